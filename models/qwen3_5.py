"""Qwen3.5, its text model: Qwen3-Next with dense MLPs, and a projection for each input of a
DeltaNet.

T tokens, D model width. Images have positions of three kinds; those of text are equal, and rotary
positions are then the usual ones.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from atomc.files.json_types import JSONLike
from atomc.models.config import (
    flag,
    head_counts,
    head_width,
    integer,
    number,
    only,
    text_config,
)
from atomc.models.decoder import DECODER_SHARD, CausalLM, Layer
from atomc.models.gated_delta_net import (
    DeltaNet,
    DeltaNetLayer,
    DeltaNetSizes,
    Projected,
    hybrid_layer_types,
)
from atomc.models.layers import MLP, OnePlusRMSNorm
from atomc.models.mtp import MTP, WithMTP
from atomc.models.qwen3_next import PARTIAL_ROTARY, Attention
from atomc.models.rotary import Rotary, rope_parameters, rotated_columns

# Delta nets are divided by heads: see atomc.parallel.delta_nets.
SHARD = DECODER_SHARD


@dataclass(frozen=True)
class Config:
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    layer_types: tuple[str, ...]
    delta_net: DeltaNetSizes
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rotated_columns: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_parameters: Mapping[str, JSONLike]
    attention_bias: bool
    tie_word_embeddings: bool

    @classmethod
    def from_hf(cls, hf: Mapping[str, JSONLike]) -> "Config":
        """Raises ValueError for a missing field or an unsupported value."""
        hf = text_config(hf)
        only(hf, "hidden_act", "silu")
        heads, kv_heads = head_counts(hf)
        head_dim = head_width(hf, 256)
        rope = rope_parameters(hf, PARTIAL_ROTARY)
        return cls(
            vocab_size=integer(hf, "vocab_size"),
            hidden_size=integer(hf, "hidden_size"),
            intermediate_size=integer(hf, "intermediate_size"),
            num_hidden_layers=integer(hf, "num_hidden_layers"),
            layer_types=hybrid_layer_types(hf),
            delta_net=DeltaNetSizes.from_hf(hf),
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            rotated_columns=rotated_columns(hf, rope, head_dim),
            max_position_embeddings=integer(hf, "max_position_embeddings", 32768),
            rms_norm_eps=number(hf, "rms_norm_eps", 1e-6),
            rope_parameters=rope,
            attention_bias=flag(hf, "attention_bias"),
            tie_word_embeddings=flag(hf, "tie_word_embeddings"),
        )


class SplitDeltaNet(DeltaNet):
    """A projection each for queries, keys and values, for the gate of the result, and for the
    numbers b and a of each value head.
    """

    def __init__(self, width: int, sizes: DeltaNetSizes, eps: float):
        super().__init__(width, sizes, eps)
        self.in_proj_qkv = nn.Linear(width, 2 * sizes.keys + sizes.values, bias=False)
        self.in_proj_z = nn.Linear(width, sizes.values, bias=False)
        self.in_proj_b = nn.Linear(width, sizes.num_value_heads, bias=False)
        self.in_proj_a = nn.Linear(width, sizes.num_value_heads, bias=False)

    def project(self, x_TD: Tensor) -> Projected:
        z_TNV = self.in_proj_z(x_TD).unflatten(-1, (-1, self.head_v_dim))
        return Projected(
            self.in_proj_qkv(x_TD), z_TNV, self.in_proj_b(x_TD).sigmoid(), self.in_proj_a(x_TD)
        )


def layer_of(config: Config, kind: str) -> nn.Module:
    width = config.hidden_size
    mlp = MLP(width, config.intermediate_size)
    if kind == "full_attention":
        return Layer(config, Attention(config), mlp, OnePlusRMSNorm)
    delta_net = SplitDeltaNet(width, config.delta_net, config.rms_norm_eps)
    return DeltaNetLayer(config, delta_net, mlp)


def draft_layer_of(config: Config) -> MTP:
    return MTP(config, layer_of(config, "full_attention"))


class Qwen3_5ForCausalLM(CausalLM, WithMTP):
    """draft_layer: with the checkpoint's draft layer."""

    def __init__(self, config: Config, *, draft_layer: bool = False):
        layers = (layer_of(config, kind) for kind in config.layer_types)
        rotary = Rotary(config.rope_parameters, config.rotated_columns)
        super().__init__(config, layers, rotary, norm=OnePlusRMSNorm)
        self.mtp = draft_layer_of(config) if draft_layer else None

    @classmethod
    def from_hf(
        cls, hf: Mapping[str, JSONLike], *, draft_layer: bool = False
    ) -> "Qwen3_5ForCausalLM":
        return cls(Config.from_hf(hf), draft_layer=draft_layer)
