"""Mixtral: Mistral with a mixture of experts in place of each MLP (Jiang et al. 2024).

T tokens, D model width, N query heads, K key/value heads, H head width, E experts, V vocabulary, R
rows with logits.
Tokens are flat, [T]; [B, T] works as well, every tensor then has a leading B.
"""

from collections.abc import Mapping
from dataclasses import dataclass

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
    number,
    only,
)
from atomc.models.decoder import DECODER_SHARD, CausalLM, Layer
from atomc.models.experts import Experts
from atomc.models.rotary import Rotary, apply_rope, rope_parameters

SHARD = DECODER_SHARD


@dataclass(frozen=True)
class Config:
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_experts: int
    num_experts_per_tok: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_parameters: Mapping[str, JSONLike]
    sliding_window: int | None
    tie_word_embeddings: bool

    @classmethod
    def from_hf(cls, hf: Mapping[str, JSONLike]) -> "Config":
        """Raises ValueError for a missing field or an unsupported value."""
        only(hf, "hidden_act", "silu")
        heads, kv_heads = head_counts(hf)
        experts, chosen = expert_counts(hf)
        window = None if hf.get("sliding_window") is None else integer(hf, "sliding_window")
        return cls(
            vocab_size=integer(hf, "vocab_size"),
            hidden_size=integer(hf, "hidden_size"),
            intermediate_size=integer(hf, "intermediate_size"),
            num_experts=experts,
            num_experts_per_tok=chosen,
            num_hidden_layers=integer(hf, "num_hidden_layers"),
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_width(hf),
            max_position_embeddings=integer(hf, "max_position_embeddings", 131072),
            rms_norm_eps=number(hf, "rms_norm_eps", 1e-5),
            rope_parameters=rope_parameters({"rope_theta": 1e6, **hf}),
            sliding_window=window,
            tie_word_embeddings=flag(hf, "tie_word_embeddings"),
        )


class Attention(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        width = config.hidden_size
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = config.head_dim
        self.scale = config.head_dim**-0.5
        self.window = config.sliding_window or 0
        self.q_proj = nn.Linear(width, heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(width, kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(width, kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(heads * self.head_dim, width, bias=False)
        self.kv = ops.kv_state(kv_heads, self.head_dim)

    def forward(self, x_TD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q_TNH = self.q_proj(x_TD).unflatten(-1, (-1, self.head_dim))
        k_TKH = self.k_proj(x_TD).unflatten(-1, (-1, self.head_dim))
        v_TKH = self.v_proj(x_TD).unflatten(-1, (-1, self.head_dim))
        q_TNH, k_TKH = apply_rope(q_TNH, k_TKH, cos, sin)
        out_TNH = ops.attention(q_TNH, k_TKH, v_TKH, self.kv, scale=self.scale, window=self.window)
        out_TD: Tensor = self.o_proj(out_TNH.flatten(-2))
        return out_TD


class Router(nn.Module):
    """The experts of each token, and their weights: softmax over all experts, in fp32."""

    def __init__(self, config: Config):
        super().__init__()
        self.num_experts_per_tok = config.num_experts_per_tok
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """-> ids [T, k] i64, weights [T, k] f32, which add up to 1."""
        logits_TE = F.linear(x_TD, self.weight)
        scores_TE = logits_TE.float().softmax(-1)
        weights, ids = scores_TE.topk(self.num_experts_per_tok, dim=-1)
        return ids, weights / weights.sum(-1, keepdim=True)


class MoE(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.gate = Router(config)
        self.experts = Experts(config.num_experts, config.hidden_size, config.intermediate_size)

    def forward(self, x: Tensor) -> Tensor:
        x_TD = x.flatten(0, -2)
        ids, weights = self.gate(x_TD)
        y: Tensor = self.experts(x_TD, ids, weights)
        return y.view_as(x)


class MixtralForCausalLM(CausalLM):
    def __init__(self, config: Config):
        count = range(config.num_hidden_layers)
        layers = (Layer(config, Attention(config), MoE(config)) for _ in count)
        super().__init__(config, layers, Rotary(config.rope_parameters, config.head_dim))

    @classmethod
    def from_hf(cls, hf: Mapping[str, JSONLike]) -> "MixtralForCausalLM":
        return cls(Config.from_hf(hf))
