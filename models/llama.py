"""Llama 2 and 3, and Mistral: grouped-query attention, rotary positions, gated MLP, pre-norm.

T tokens, D model width, N query heads, K key/value heads, H head width.
"""

from dataclasses import dataclass
from typing import Self

from torch import Tensor

from atomc import ops
from atomc.files.json_types import JSONMapping
from atomc.models.config import AttentionConfig, head_fields, integer, only
from atomc.models.decoder import CausalLM, GroupedQueryAttention, Layer
from atomc.models.layers import MLP
from atomc.models.rotary import Rotary, apply_rope, rope_parameters


@dataclass(frozen=True, kw_only=True)
class Config(AttentionConfig):
    intermediate_size: int
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    sliding_window: int | None
    mlp_bias: bool = False

    @classmethod
    def from_hf(cls, hf: JSONMapping) -> Self:
        only(hf, "hidden_act", "silu")
        window = None
        # In Mistral's config null means no window, and a missing field means 4096.
        if hf.get("model_type") == "mistral" and hf.get("sliding_window", 4096) is not None:
            window = integer(hf, "sliding_window", 4096)
        rope = rope_parameters(hf)
        return cls.read(hf, **head_fields(hf), rope_parameters=rope, sliding_window=window)


class Attention(GroupedQueryAttention):
    def forward(self, x_TD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q_TNH = self.q_proj(x_TD).unflatten(-1, (-1, self.head_dim))
        k_TKH = self.k_proj(x_TD).unflatten(-1, (-1, self.head_dim))
        v_TKH = self.v_proj(x_TD).unflatten(-1, (-1, self.head_dim))
        q_TNH, k_TKH = apply_rope(q_TNH, k_TKH, cos, sin)
        out_TNH = ops.attention(q_TNH, k_TKH, v_TKH, self.kv, scale=self.scale, window=self.window)
        out_TD: Tensor = self.o_proj(out_TNH.flatten(-2))
        return out_TD


def _layer(config: Config) -> Layer:
    mlp = MLP(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
    return Layer(config, Attention(config, config.sliding_window or 0), mlp)


class LlamaForCausalLM(CausalLM):
    config_class = Config

    def __init__(self, config: Config):
        layers = (_layer(config) for _ in range(config.num_hidden_layers))
        super().__init__(config, layers, Rotary(config.rope_parameters, config.head_dim))
