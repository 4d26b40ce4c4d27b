"""GLM-4.5: dense layers, then layers of experts beside shared ones, chosen as in DeepSeek-V3; a
part of each head is rotated.

T tokens, D model width, N query heads, K key/value heads, H head width, E experts.
"""

from dataclasses import dataclass
from typing import Self

from torch import Tensor, nn

from atomc import ops
from atomc.files.json_types import JSONMapping
from atomc.models.config import (
    AttentionConfig,
    count,
    expert_counts,
    expert_groups,
    head_fields,
    only,
)
from atomc.models.decoder import GroupedQueryAttention, Layer
from atomc.models.grouped_experts import GroupedExpertsConfig, MoE
from atomc.models.layers import MLP, RMSNorm
from atomc.models.mtp import DraftLayer, WithNumberedDraftLayers
from atomc.models.rotary import Rotary, apply_partial_rope, rope_parameters, rotated_columns


@dataclass(frozen=True, kw_only=True)
class Config(AttentionConfig, GroupedExpertsConfig):
    intermediate_size: int
    norm_topk_prob: bool = True
    n_shared_experts: int = 1
    routed_scaling_factor: float = 1.0
    first_k_dense_replace: int
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-5
    rotated_columns: int
    use_qk_norm: bool = False

    @classmethod
    def from_hf(cls, hf: JSONMapping) -> Self:
        only(hf, "hidden_act", "silu")
        heads, rope = head_fields(hf), rope_parameters(hf, partial=0.5)
        experts, per_token = expert_counts(hf)
        groups, topk_groups = expert_groups(hf)
        return cls.read(
            hf,
            **heads,
            n_routed_experts=experts,
            num_experts_per_tok=per_token,
            n_group=groups,
            topk_group=topk_groups,
            first_k_dense_replace=count(hf, "first_k_dense_replace", 1),
            rope_parameters=rope,
            rotated_columns=rotated_columns(hf, rope, heads["head_dim"]),
        )


class Attention(GroupedQueryAttention):
    def __init__(self, config: Config):
        super().__init__(config, output_bias=False)
        self.q_norm, self.k_norm = _head_norm(config), _head_norm(config)

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


def _mlp(config: Config, index: int) -> nn.Module:
    if index >= config.first_k_dense_replace:
        return MoE(config)
    return MLP(config.hidden_size, config.intermediate_size)


class Glm4MoeForCausalLM(WithNumberedDraftLayers):
    """draft_layers: how many of the checkpoint's."""

    config_class = Config

    def __init__(self, config: Config, *, draft_layers: int = 0):
        depth = config.num_hidden_layers
        layers = (Layer(config, Attention(config), _mlp(config, i)) for i in range(depth))
        rotary_emb = Rotary(config.rope_parameters, config.rotated_columns)
        drafts = (
            DraftLayer(config, Attention(config), _mlp(config, depth)) for _ in range(draft_layers)
        )
        super().__init__(config, layers, rotary_emb, drafts=drafts)
