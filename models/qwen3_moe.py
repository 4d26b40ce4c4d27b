"""Qwen3-MoE: Qwen3 whose MLPs are mixtures of experts (Yang et al. 2025), all or some of them.

T tokens, D model width, N query heads, K key/value heads, H head width, E experts, V vocabulary, R
rows with logits.
Tokens are flat, [T]; [B, T] works as well, every tensor then has a leading B.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atomc import ops
from atomc.files.json_types import JSONLike
from atomc.models.config import (
    expert_counts,
    flag,
    head_counts,
    head_width,
    integer,
    model_type,
    number,
    only,
)
from atomc.models.decoder import DECODER_SHARD, CausalLM, Layer
from atomc.models.experts import Experts
from atomc.models.layers import MLP, RMSNorm
from atomc.models.rotary import Rotary, apply_rope, rope_parameters

SHARD = DECODER_SHARD


@dataclass(frozen=True)
class Config:
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    num_experts: int
    num_experts_per_tok: int
    norm_topk_prob: bool
    moe_layers: frozenset[int]
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_parameters: Mapping[str, JSONLike]
    sliding_window: int | None
    attention_bias: bool
    tie_word_embeddings: bool

    @classmethod
    def from_hf(cls, hf: Mapping[str, JSONLike]) -> "Config":
        """Raises ValueError for a missing field or an unsupported value."""
        only(hf, "hidden_act", "silu")
        heads, kv_heads = head_counts(hf)
        experts, chosen = expert_counts(hf)
        window = None
        if flag(hf, "use_sliding_window") and hf.get("sliding_window", 4096) is not None:
            window = integer(hf, "sliding_window", 4096)
        return cls(
            vocab_size=integer(hf, "vocab_size"),
            hidden_size=integer(hf, "hidden_size"),
            intermediate_size=integer(hf, "intermediate_size"),
            moe_intermediate_size=integer(hf, "moe_intermediate_size"),
            num_experts=experts,
            num_experts_per_tok=chosen,
            norm_topk_prob=flag(hf, "norm_topk_prob"),
            moe_layers=moe_layers(hf),
            num_hidden_layers=integer(hf, "num_hidden_layers"),
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_width(hf),
            max_position_embeddings=integer(hf, "max_position_embeddings", 32768),
            rms_norm_eps=number(hf, "rms_norm_eps", 1e-6),
            rope_parameters=rope_parameters(hf),
            sliding_window=window,
            attention_bias=flag(hf, "attention_bias"),
            tie_word_embeddings=flag(hf, "tie_word_embeddings"),
        )


def moe_layers(hf: Mapping[str, JSONLike]) -> frozenset[int]:
    """The layers with experts: every decoder_sparse_step-th, except mlp_only_layers."""
    step, dense = integer(hf, "decoder_sparse_step", 1), hf.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise ValueError(f"{model_type(hf)}: mlp_only_layers {dense!r:.40} is not a list")
    layers = range(integer(hf, "num_hidden_layers"))
    return frozenset(i for i in layers if i not in dense and (i + 1) % step == 0)


class Attention(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        width, bias = config.hidden_size, config.attention_bias
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = config.head_dim
        self.scale = config.head_dim**-0.5
        self.window = config.sliding_window or 0
        self.q_proj = nn.Linear(width, heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(width, kv_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(width, kv_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(heads * self.head_dim, width, bias=bias)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.kv = ops.kv_state(kv_heads, self.head_dim)

    def forward(self, x_TD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q_TNH = self.q_norm(self.q_proj(x_TD).unflatten(-1, (-1, self.head_dim)))
        k_TKH = self.k_norm(self.k_proj(x_TD).unflatten(-1, (-1, self.head_dim)))
        v_TKH = self.v_proj(x_TD).unflatten(-1, (-1, self.head_dim))
        q_TNH, k_TKH = apply_rope(q_TNH, k_TKH, cos, sin)
        out_TNH = ops.attention(q_TNH, k_TKH, v_TKH, self.kv, scale=self.scale, window=self.window)
        out_TD: Tensor = self.o_proj(out_TNH.flatten(-2))
        return out_TD


class RouterConfig(Protocol):
    """The fields that the router reads."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def num_experts(self) -> int: ...
    @property
    def num_experts_per_tok(self) -> int: ...
    @property
    def norm_topk_prob(self) -> bool: ...


class Router(nn.Module):
    """The experts of each token, and their weights: softmax over all experts, in fp32."""

    def __init__(self, config: RouterConfig):
        super().__init__()
        self.num_experts_per_tok = config.num_experts_per_tok
        self.norm_topk_prob = config.norm_topk_prob
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """-> ids [T, k] i64, weights [T, k] in x.dtype."""
        logits_TE = F.linear(x_TD, self.weight)
        scores_TE = logits_TE.softmax(-1, dtype=torch.float32)
        weights, ids = scores_TE.topk(self.num_experts_per_tok, dim=-1)
        if self.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        return ids, weights.to(x_TD.dtype)


class MoE(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.experts = Experts(config.num_experts, config.hidden_size, config.moe_intermediate_size)
        self.gate = Router(config)

    def forward(self, x: Tensor) -> Tensor:
        x_TD = x.flatten(0, -2)
        ids, weights = self.gate(x_TD)
        y: Tensor = self.experts(x_TD, ids, weights)
        return y.view_as(x)


def _layer(config: Config, index: int) -> Layer:
    is_sparse = index in config.moe_layers
    mlp = MoE(config) if is_sparse else MLP(config.hidden_size, config.intermediate_size)
    return Layer(config, Attention(config), mlp)


class Qwen3MoeForCausalLM(CausalLM):
    def __init__(self, config: Config):
        layers = (_layer(config, i) for i in range(config.num_hidden_layers))
        super().__init__(config, layers, Rotary(config.rope_parameters, config.head_dim))

    @classmethod
    def from_hf(cls, hf: Mapping[str, JSONLike]) -> "Qwen3MoeForCausalLM":
        return cls(Config.from_hf(hf))
