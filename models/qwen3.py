"""Qwen3 (dense): Llama with a norm on each query and key head, and a window on some layers.

T tokens, D model width, N query heads, K key/value heads, H head width.
"""

from dataclasses import dataclass
from typing import Self

from torch import Tensor

from atomc import ops
from atomc.files.json_types import JSONMapping
from atomc.models.config import (
    AttentionConfig,
    count,
    flag,
    head_fields,
    integer,
    layer_types,
    only,
)
from atomc.models.decoder import CausalLM, GroupedQueryAttention, Layer
from atomc.models.layers import MLP, RMSNorm
from atomc.models.rotary import Rotary, apply_rope, rope_parameters


@dataclass(frozen=True, kw_only=True)
class Config(AttentionConfig):
    intermediate_size: int
    max_position_embeddings: int = 32768
    rms_norm_eps: float = 1e-6
    sliding_window: int | None
    layer_types: tuple[str, ...]

    @classmethod
    def from_hf(cls, hf: JSONMapping) -> Self:
        only(hf, "hidden_act", "silu")
        window = sliding_window(hf)
        return cls.read(
            hf,
            **head_fields(hf, 128),
            rope_parameters=rope_parameters(hf),
            sliding_window=window,
            layer_types=layer_types(hf, _default_layer_types(hf, window)),
        )


def sliding_window(hf: JSONMapping) -> int | None:
    """The window of a config that uses one."""
    if flag(hf, "use_sliding_window") and hf.get("sliding_window", 4096) is not None:
        return integer(hf, "sliding_window", 4096)
    return None


def _default_layer_types(hf: JSONMapping, window: int | None) -> list[str]:
    """Of an older config, which only has the first layer with a window."""
    num_layers = integer(hf, "num_hidden_layers")
    first = count(hf, "max_window_layers", 28) if window else num_layers
    return ["sliding_attention" if i >= first else "full_attention" for i in range(num_layers)]


class Attention(GroupedQueryAttention):
    def __init__(self, config: AttentionConfig, window: int):
        super().__init__(config, window)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)

    def forward(self, x_TD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q_TNH = self.q_norm(self.q_proj(x_TD).unflatten(-1, (-1, self.head_dim)))
        k_TKH = self.k_norm(self.k_proj(x_TD).unflatten(-1, (-1, self.head_dim)))
        v_TKH = self.v_proj(x_TD).unflatten(-1, (-1, self.head_dim))
        q_TNH, k_TKH = apply_rope(q_TNH, k_TKH, cos, sin)
        out_TNH = ops.attention(q_TNH, k_TKH, v_TKH, self.kv, scale=self.scale, window=self.window)
        out_TD: Tensor = self.o_proj(out_TNH.flatten(-2))
        return out_TD


def layer_of(config: Config, window: int) -> Layer:
    mlp = MLP(config.hidden_size, config.intermediate_size)
    return Layer(config, Attention(config, window), mlp)


class Qwen3ForCausalLM(CausalLM):
    config_class = Config

    def __init__(self, config: Config):
        windows = {"full_attention": 0, "sliding_attention": config.sliding_window or 0}
        layers = (layer_of(config, windows[kind]) for kind in config.layer_types)
        super().__init__(config, layers, Rotary(config.rope_parameters, config.head_dim))
