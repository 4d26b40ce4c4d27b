"""Hunyuan-A13B: experts beside a shared MLP; queries and keys are rotated, then normalized.

T tokens, D model width, N query heads, K key/value heads, H head width, E experts.
Tokens are flat, [T]; [B, T] works as well, every tensor then has a leading B.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn

from atomc import ops
from atomc.files.json_types import JSONMapping
from atomc.models.config import (
    AttentionConfig,
    expert_counts,
    head_fields,
    head_width,
    number,
    only,
)
from atomc.models.decoder import DECODER_SHARD, CausalLM, GroupedQueryAttention, Layer
from atomc.models.experts import Experts
from atomc.models.layers import MLP, RMSNorm, keeping_dtype
from atomc.models.rotary import Rotary, apply_rope, rope_parameters

SHARD = DECODER_SHARD


@dataclass(frozen=True, kw_only=True)
class Config(AttentionConfig):
    intermediate_size: int
    num_experts: int
    moe_topk: int
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-5

    @classmethod
    def from_hf(cls, hf: JSONMapping) -> Self:
        """Raises ValueError for a missing field or an unsupported value."""
        only(hf, "hidden_act", "silu")
        only(hf, "attention_bias", False)
        experts, topk = expert_counts({**hf, "num_experts_per_tok": hf.get("moe_topk", 1)})
        heads = head_fields(hf)
        return cls.read(hf, **heads, num_experts=experts, moe_topk=topk, rope_parameters=_rope(hf))


def _rope(hf: JSONMapping) -> JSONMapping:
    """The rope settings; "dynamic" with a fixed alpha is the default with a larger theta."""
    scaling = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    if not isinstance(scaling, dict) or not scaling.get("alpha"):
        return rope_parameters(hf)
    rope = rope_parameters({**hf, "rope_scaling": {**scaling, "rope_type": "default"}})
    stretch = number(scaling, "alpha") ** (head_width(hf) / (head_width(hf) - 2))
    return {**rope, "rope_theta": number(rope, "rope_theta") * stretch}


class Attention(GroupedQueryAttention):
    def __init__(self, config: Config):
        super().__init__(config)
        self.query_layernorm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.key_layernorm = RMSNorm(self.head_dim, config.rms_norm_eps)

    def forward(self, x_TD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q_TNH = self.q_proj(x_TD).unflatten(-1, (-1, self.head_dim))
        k_TKH = self.k_proj(x_TD).unflatten(-1, (-1, self.head_dim))
        v_TKH = self.v_proj(x_TD).unflatten(-1, (-1, self.head_dim))
        q_TNH, k_TKH = apply_rope(q_TNH, k_TKH, cos, sin)
        q_TNH, k_TKH = self.query_layernorm(q_TNH), self.key_layernorm(k_TKH)
        out_TNH = ops.attention(q_TNH, k_TKH, v_TKH, self.kv, scale=self.scale)
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
    config_class = Config

    def __init__(self, config: Config):
        count = range(config.num_hidden_layers)
        layers = (Layer(config, Attention(config), MoE(config)) for _ in count)
        super().__init__(config, layers, Rotary(config.rope_parameters, config.head_dim))
