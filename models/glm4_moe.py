"""GLM-4.5: dense layers, then layers of experts beside shared ones, chosen as in DeepSeek-V3; a
part of each head is rotated.

T tokens, D model width, N query heads, K key/value heads, H head width, E experts, V vocabulary, R
rows with logits.
Tokens are flat, [T]; [B, T] works as well, every tensor then has a leading B.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from atomc import ops
from atomc.files.json_types import JSONLike
from atomc.models.config import (
    count,
    expert_counts,
    expert_groups,
    flag,
    head_counts,
    head_width,
    integer,
    number,
    only,
)
from atomc.models.decoder import DECODER_SHARD, Layer
from atomc.models.experts import Experts
from atomc.models.group_router import GroupRouter
from atomc.models.layers import MLP, RMSNorm
from atomc.models.mtp import DraftLayer, WithNumberedDraftLayer
from atomc.models.rotary import Rotary, apply_partial_rope, rope_parameters, rotated_columns

SHARD = DECODER_SHARD


@dataclass(frozen=True)
class Config:
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    norm_topk_prob: bool
    n_shared_experts: int
    n_group: int
    topk_group: int
    routed_scaling_factor: float
    first_k_dense_replace: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_parameters: Mapping[str, JSONLike]
    rotated_columns: int
    attention_bias: bool
    use_qk_norm: bool
    tie_word_embeddings: bool

    @classmethod
    def from_hf(cls, hf: Mapping[str, JSONLike]) -> "Config":
        """Raises ValueError for a missing field or an unsupported value."""
        only(hf, "hidden_act", "silu")
        heads, kv_heads = head_counts(hf)
        experts, chosen = expert_counts(hf)
        groups, topk_groups = expert_groups(hf)
        head_dim, rope = head_width(hf), rope_parameters(hf, partial=0.5)
        return cls(
            vocab_size=integer(hf, "vocab_size"),
            hidden_size=integer(hf, "hidden_size"),
            intermediate_size=integer(hf, "intermediate_size"),
            moe_intermediate_size=integer(hf, "moe_intermediate_size"),
            n_routed_experts=experts,
            num_experts_per_tok=chosen,
            norm_topk_prob=flag(hf, "norm_topk_prob", True),
            n_shared_experts=integer(hf, "n_shared_experts", 1),
            n_group=groups,
            topk_group=topk_groups,
            routed_scaling_factor=number(hf, "routed_scaling_factor", 1.0),
            first_k_dense_replace=count(hf, "first_k_dense_replace", 1),
            num_hidden_layers=integer(hf, "num_hidden_layers"),
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            max_position_embeddings=integer(hf, "max_position_embeddings", 131072),
            rms_norm_eps=number(hf, "rms_norm_eps", 1e-5),
            rope_parameters=rope,
            rotated_columns=rotated_columns(hf, rope, head_dim),
            attention_bias=flag(hf, "attention_bias"),
            use_qk_norm=flag(hf, "use_qk_norm"),
            tie_word_embeddings=flag(hf, "tie_word_embeddings"),
        )


class Attention(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        width, bias = config.hidden_size, config.attention_bias
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = config.head_dim
        self.scale = config.head_dim**-0.5
        self.q_proj = nn.Linear(width, heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(width, kv_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(width, kv_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(heads * self.head_dim, width, bias=False)
        self.q_norm, self.k_norm = _head_norm(config), _head_norm(config)
        self.kv = ops.kv_state(kv_heads, self.head_dim)

    def forward(self, x_TD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q_TNH = self.q_norm(self.q_proj(x_TD).unflatten(-1, (-1, self.head_dim)))
        k_TKH = self.k_norm(self.k_proj(x_TD).unflatten(-1, (-1, self.head_dim)))
        v_TKH = self.v_proj(x_TD).unflatten(-1, (-1, self.head_dim))
        q_TNH, k_TKH = apply_partial_rope(q_TNH, k_TKH, cos, sin)
        out_TNH = ops.attention(q_TNH, k_TKH, v_TKH, self.kv, scale=self.scale)
        out_TD: Tensor = self.o_proj(out_TNH.flatten(-2))
        return out_TD


def _head_norm(config: Config) -> nn.Module:
    return RMSNorm(config.head_dim, config.rms_norm_eps) if config.use_qk_norm else nn.Identity()


class MoE(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        width, expert_width = config.hidden_size, config.moe_intermediate_size
        self.experts = Experts(config.n_routed_experts, width, expert_width)
        self.gate = GroupRouter(
            config.n_routed_experts,
            width,
            chosen=config.num_experts_per_tok,
            groups=config.n_group,
            topk_groups=config.topk_group,
            renormalize=config.norm_topk_prob,
            scale=config.routed_scaling_factor,
        )
        self.shared_experts = MLP(width, expert_width * config.n_shared_experts)

    def forward(self, x: Tensor) -> Tensor:
        x_TD = x.flatten(0, -2)
        ids, weights = self.gate(x_TD)
        routed: Tensor = self.experts(x_TD, ids, weights)
        shared: Tensor = self.shared_experts(x)
        return routed.view_as(x) + shared


def _mlp(config: Config, index: int) -> nn.Module:
    if index >= config.first_k_dense_replace:
        return MoE(config)
    return MLP(config.hidden_size, config.intermediate_size)


class Glm4MoeForCausalLM(WithNumberedDraftLayer):
    """draft_layer: with the checkpoint's first draft layer."""

    def __init__(self, config: Config, *, draft_layer: bool = False):
        depth = config.num_hidden_layers
        layers = (Layer(config, Attention(config), _mlp(config, i)) for i in range(depth))
        rotary_emb = Rotary(config.rope_parameters, config.rotated_columns)
        draft = DraftLayer(config, Attention(config), _mlp(config, depth)) if draft_layer else None
        super().__init__(config, layers, rotary_emb, draft=draft)

    @classmethod
    def from_hf(
        cls, hf: Mapping[str, JSONLike], *, draft_layer: bool = False
    ) -> "Glm4MoeForCausalLM":
        return cls(Config.from_hf(hf), draft_layer=draft_layer)
