"""Hunyuan-A13B: a mixture of experts beside a shared MLP; queries and keys are rotated, then
normalized.

T tokens, D model width, N query heads, K key/value heads, H head width, E experts.
Tokens are flat, [T]; [B, T] works as well, every tensor then has a leading B.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from atomc import ops
from atomc.files.json_types import JSONLike
from atomc.models.config import expert_counts, flag, head_counts, head_width, integer, number, only
from atomc.models.decoder import DECODER_SHARD, CausalLM, Layer
from atomc.models.experts import Experts
from atomc.models.layers import MLP, RMSNorm, keeping_dtype
from atomc.models.rotary import Rotary, apply_rope, rope_parameters

SHARD = DECODER_SHARD


@dataclass(frozen=True)
class Config:
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_experts: int
    moe_topk: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_parameters: Mapping[str, JSONLike]
    tie_word_embeddings: bool

    @classmethod
    def from_hf(cls, hf: Mapping[str, JSONLike]) -> "Config":
        """Raises ValueError for a missing field or an unsupported value."""
        only(hf, "hidden_act", "silu")
        only(hf, "attention_bias", False)
        heads, kv_heads = head_counts(hf)
        experts, chosen = expert_counts({**hf, "num_experts_per_tok": hf.get("moe_topk", 1)})
        return cls(
            vocab_size=integer(hf, "vocab_size"),
            hidden_size=integer(hf, "hidden_size"),
            intermediate_size=integer(hf, "intermediate_size"),
            num_experts=experts,
            moe_topk=chosen,
            num_hidden_layers=integer(hf, "num_hidden_layers"),
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_width(hf),
            max_position_embeddings=integer(hf, "max_position_embeddings", 2048),
            rms_norm_eps=number(hf, "rms_norm_eps", 1e-5),
            rope_parameters=_rope(hf),
            tie_word_embeddings=flag(hf, "tie_word_embeddings"),
        )


def _rope(hf: Mapping[str, JSONLike]) -> Mapping[str, JSONLike]:
    """The rope settings; "dynamic" with a fixed alpha is the default with a larger theta."""
    given = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    if not isinstance(given, dict) or not given.get("alpha"):
        return rope_parameters(hf)
    rope = rope_parameters({**hf, "rope_scaling": {**given, "rope_type": "default"}})
    stretch = number(given, "alpha") ** (head_width(hf) / (head_width(hf) - 2))
    return {**rope, "rope_theta": number(rope, "rope_theta") * stretch}


class Attention(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        width, self.head_dim = config.hidden_size, config.head_dim
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.q_proj = nn.Linear(width, heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(width, kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(width, kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(heads * self.head_dim, width, bias=False)
        self.query_layernorm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.key_layernorm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.kv = ops.kv_state(kv_heads, self.head_dim)

    def forward(self, x_TD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q_TNH = self.q_proj(x_TD).unflatten(-1, (-1, self.head_dim))
        k_TKH = self.k_proj(x_TD).unflatten(-1, (-1, self.head_dim))
        v_TKH = self.v_proj(x_TD).unflatten(-1, (-1, self.head_dim))
        q_TNH, k_TKH = apply_rope(q_TNH, k_TKH, cos, sin)
        q_TNH, k_TKH = self.query_layernorm(q_TNH), self.key_layernorm(k_TKH)
        out_TNH = ops.attention(q_TNH, k_TKH, v_TKH, self.kv, scale=self.head_dim**-0.5)
        out_TD: Tensor = self.o_proj(out_TNH.flatten(-2))
        return out_TD


class Router(nn.Module):
    """The experts of each token, and their weights: softmax over all experts, in fp32."""

    def __init__(self, config: Config):
        super().__init__()
        self.moe_topk = config.moe_topk
        self.wg = nn.Linear(config.hidden_size, config.num_experts, bias=False, dtype=torch.float32)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Router":
        """Move to the model's device, but keep the weight in fp32, as transformers does."""
        super()._apply(keeping_dtype(fn, self.wg.weight), recurse)  # type: ignore[no-untyped-call]
        return self

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """-> ids [T, k] i64, weights [T, k] f32, which add up to 1."""
        scores_TE = self.wg(x_TD.float()).softmax(-1)
        weights, ids = scores_TE.topk(self.moe_topk, dim=-1)
        return ids, weights / weights.sum(-1, keepdim=True)


class MoE(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        width, expert_width = config.hidden_size, config.intermediate_size
        self.gate = Router(config)
        self.experts = Experts(config.num_experts, width, expert_width)
        self.shared_mlp = MLP(width, expert_width)

    def forward(self, x: Tensor) -> Tensor:
        x_TD = x.flatten(0, -2)
        ids, weights = self.gate(x_TD)
        routed: Tensor = self.experts(x_TD, ids, weights)
        shared: Tensor = self.shared_mlp(x)
        return routed.view_as(x) + shared


class HunYuanMoEV1ForCausalLM(CausalLM):
    def __init__(self, config: Config):
        count = range(config.num_hidden_layers)
        layers = (Layer(config, Attention(config), MoE(config)) for _ in count)
        super().__init__(config, layers, Rotary(config.rope_parameters, config.head_dim))

    @classmethod
    def from_hf(cls, hf: Mapping[str, JSONLike]) -> "HunYuanMoEV1ForCausalLM":
        return cls(Config.from_hf(hf))
