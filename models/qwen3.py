"""Qwen3 (dense): Llama with a norm on each query and key head, and a window on some layers.

T tokens, D model width, N query heads, K key/value heads, H head width, V vocabulary, R rows with
logits.
Tokens are flat, [T]; [B, T] works as well, every tensor then has a leading B.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from atomc import ops
from atomc.files.json_types import JSONLike
from atomc.models.config import (
    count,
    flag,
    head_counts,
    head_width,
    integer,
    layer_types,
    number,
    only,
)
from atomc.models.decoder import DECODER_SHARD, CausalLM, Layer
from atomc.models.layers import MLP, RMSNorm
from atomc.models.rotary import Rotary, apply_rope, rope_parameters

SHARD = DECODER_SHARD


@dataclass(frozen=True)
class Config:
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_parameters: Mapping[str, JSONLike]
    sliding_window: int | None
    layer_types: tuple[str, ...]
    attention_bias: bool
    tie_word_embeddings: bool

    @classmethod
    def from_hf(cls, hf: Mapping[str, JSONLike]) -> "Config":
        """Raises ValueError for a missing field or an unsupported value."""
        only(hf, "hidden_act", "silu")
        heads, kv_heads = head_counts(hf)
        window = None
        if flag(hf, "use_sliding_window") and hf.get("sliding_window", 4096) is not None:
            window = integer(hf, "sliding_window", 4096)
        return cls(
            vocab_size=integer(hf, "vocab_size"),
            hidden_size=integer(hf, "hidden_size"),
            intermediate_size=integer(hf, "intermediate_size"),
            num_hidden_layers=integer(hf, "num_hidden_layers"),
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_width(hf, 128),
            max_position_embeddings=integer(hf, "max_position_embeddings", 32768),
            rms_norm_eps=number(hf, "rms_norm_eps", 1e-6),
            rope_parameters=rope_parameters(hf),
            sliding_window=window,
            layer_types=layer_types(hf, _default_layer_types(hf, window)),
            attention_bias=flag(hf, "attention_bias"),
            tie_word_embeddings=flag(hf, "tie_word_embeddings"),
        )


def _default_layer_types(hf: Mapping[str, JSONLike], window: int | None) -> list[str]:
    """Of an older config, which only has the first layer with a window."""
    num_layers = integer(hf, "num_hidden_layers")
    first = count(hf, "max_window_layers", 28) if window else num_layers
    return ["sliding_attention" if i >= first else "full_attention" for i in range(num_layers)]


class Attention(nn.Module):
    def __init__(self, config: Config, window: int):
        super().__init__()
        width, bias = config.hidden_size, config.attention_bias
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = config.head_dim
        self.scale = config.head_dim**-0.5
        self.window = window
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


def _layer(config: Config, window: int) -> Layer:
    mlp = MLP(config.hidden_size, config.intermediate_size)
    return Layer(config, Attention(config, window), mlp)


class Qwen3ForCausalLM(CausalLM):
    def __init__(self, config: Config):
        windows = {"full_attention": 0, "sliding_attention": config.sliding_window or 0}
        layers = (_layer(config, windows[kind]) for kind in config.layer_types)
        super().__init__(config, layers, Rotary(config.rope_parameters, config.head_dim))

    @classmethod
    def from_hf(cls, hf: Mapping[str, JSONLike]) -> "Qwen3ForCausalLM":
        return cls(Config.from_hf(hf))
