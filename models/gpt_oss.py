"""GPT-OSS (OpenAI 2025): attention with sinks, in every other layer within a window, and experts
with biases and a clamped SwiGLU.

T tokens, D model width, N query heads, K key/value heads, H head width, E experts, k experts of
each token.
"""

from dataclasses import dataclass
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atomc import ops
from atomc.files.json_types import JSONMapping
from atomc.models.config import (
    AttentionConfig,
    expert_fields,
    head_fields,
    integer,
    layer_types,
    only,
)
from atomc.models.decoder import DECODER_SHARD, CausalLM, GroupedQueryAttention, Layer
from atomc.models.experts import Experts
from atomc.models.rotary import Rotary, apply_rope, rope_parameters

# Of a config without rope_parameters.
ROPE: JSONMapping = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


@dataclass(frozen=True, kw_only=True)
class Config(AttentionConfig):
    intermediate_size: int
    num_experts: int
    num_experts_per_tok: int
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-5
    sliding_window: int = 128
    layer_types: tuple[str, ...]
    attention_bias: bool = True
    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0

    @classmethod
    def from_hf(cls, hf: JSONMapping) -> Self:
        only(hf, "hidden_act", "silu")
        layers = integer(hf, "num_hidden_layers")
        alternating = ["sliding_attention", "full_attention"] * layers
        return cls.read(
            hf,
            **head_fields(hf),
            **expert_fields(hf),
            rope_parameters=rope_parameters(
                {"rope_theta": 150000.0, "rope_parameters": ROPE, **hf}
            ),
            layer_types=layer_types(hf, alternating[:layers]),
        )


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight in fp32, rounded once. x [..., D] -> [..., D]."""

    def __init__(self, hidden_size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        x_f32 = x.to(torch.float32)
        variance = x_f32.pow(2).mean(-1, keepdim=True)
        return (self.weight * (x_f32 * torch.rsqrt(variance + self.eps))).to(x.dtype)


class Attention(GroupedQueryAttention):
    def __init__(self, config: Config, window: int):
        super().__init__(config, window)
        self.sinks = nn.Parameter(torch.zeros(config.num_attention_heads))

    def forward(self, x_TD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q_TNH = self.q_proj(x_TD).unflatten(-1, (-1, self.head_dim))
        k_TKH = self.k_proj(x_TD).unflatten(-1, (-1, self.head_dim))
        v_TKH = self.v_proj(x_TD).unflatten(-1, (-1, self.head_dim))
        q_TNH, k_TKH = apply_rope(q_TNH, k_TKH, cos, sin)
        out_TNH = ops.attention(
            q_TNH, k_TKH, v_TKH, self.kv, None, self.sinks, scale=self.scale, window=self.window
        )
        out_TD: Tensor = self.o_proj(out_TNH.flatten(-2))
        return out_TD


class Router(nn.Module):
    """The experts of each token, and their weights: softmax over the chosen logits."""

    def __init__(self, config: Config):
        super().__init__()
        self.num_experts_per_tok = config.num_experts_per_tok
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        self.bias = nn.Parameter(torch.zeros(config.num_experts))
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """-> ids [T, k] i64, weights [T, k] in x.dtype."""
        logits_TE = F.linear(x_TD, self.weight, self.bias)
        logits_Tk, ids = logits_TE.topk(self.num_experts_per_tok, dim=-1)
        return ids, logits_Tk.softmax(-1)


class GptOssExperts(Experts):
    """Experts with biases and a clamped SwiGLU; the rows of gate and up alternate. Checkpoints
    store the last two dimensions of each weight the other way round.
    """

    STORED_TRANSPOSED = ("gate_up_proj", "down_proj")

    def __init__(self, config: Config):
        num_experts, width = config.num_experts, config.intermediate_size
        super().__init__(num_experts, config.hidden_size, width)
        self.alpha, self.limit = config.swiglu_alpha, config.swiglu_limit
        self.gate_up_proj_bias = nn.Parameter(torch.zeros(num_experts, 2 * width))
        self.down_proj_bias = nn.Parameter(torch.zeros(num_experts, config.hidden_size))

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        h = torch.einsum("tkih,th->tki", self.gate_up_proj[ids], x) + self.gate_up_proj_bias[ids]
        gate, up = h[..., ::2], h[..., 1::2]
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        h = (up + 1) * (gate * torch.sigmoid(gate * self.alpha))
        y = torch.einsum("tkhi,tki->tkh", self.down_proj[ids], h) + self.down_proj_bias[ids]
        return (y * weights.unsqueeze(-1)).sum(1, dtype=torch.float32).to(x.dtype)


class MLP(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.router = Router(config)
        self.experts = GptOssExperts(config)

    def forward(self, x: Tensor) -> Tensor:
        x_TD = x.flatten(0, -2)
        ids, weights = self.router(x_TD)
        y: Tensor = self.experts(x_TD, ids, weights)
        return y.view_as(x)


class GptOssForCausalLM(CausalLM):
    config_class = Config
    SHARD = DECODER_SHARD | {"sinks": "colwise"}  # like query heads

    def __init__(self, config: Config):
        windows = {"full_attention": 0, "sliding_attention": config.sliding_window}
        layers = (
            Layer(config, Attention(config, windows[kind]), MLP(config), RMSNorm)
            for kind in config.layer_types
        )
        super().__init__(
            config, layers, Rotary(config.rope_parameters, config.head_dim), norm=RMSNorm
        )
