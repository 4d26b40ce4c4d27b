"""The text model of Qwen3.5: Qwen3-Next with dense MLPs; a DeltaNet projects each input by itself.

T tokens, D model width. Images have positions of three kinds; those of text are equal, and rotary
positions are then the usual ones.
"""

from dataclasses import dataclass
from typing import ClassVar, Self

from torch import Tensor, nn

from atomc.files.json_types import JSONMapping
from atomc.models.config import text_config
from atomc.models.decoder import CausalLM, Layer
from atomc.models.gated_delta_net import (
    DeltaNet,
    DeltaNetLayer,
    DeltaNetSizes,
    HybridConfig,
    Projected,
)
from atomc.models.layers import MLP, OnePlusRMSNorm
from atomc.models.mtp import MTP, WithMTP
from atomc.models.qwen3_next import Attention, ExpertsConfig, MoE
from atomc.models.rotary import Rotary


@dataclass(frozen=True, kw_only=True)
class Config(HybridConfig):
    intermediate_size: int


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


def layer_of(config: Config | ExpertsConfig, kind: str) -> nn.Module:
    """kind: of layer_types. The MLP has experts if the config has."""
    width = config.hidden_size
    if isinstance(config, ExpertsConfig):
        mlp: nn.Module = MoE(config)
    else:
        mlp = MLP(width, config.intermediate_size)
    if kind == "full_attention":
        return Layer(config, Attention(config), mlp, OnePlusRMSNorm)
    delta_net = SplitDeltaNet(width, config.delta_net, config.rms_norm_eps)
    return DeltaNetLayer(config, delta_net, mlp)


def draft_layers_of(config: Config | ExpertsConfig, count: int) -> MTP | None:
    layers = [layer_of(config, "full_attention") for _ in range(count)]
    return MTP(config, layers) if layers else None


class Qwen3_5ForCausalLM(CausalLM, WithMTP):
    """draft_layers: how many of the checkpoint's."""

    config_class: ClassVar[type[HybridConfig]] = Config

    def __init__(self, config: Config | ExpertsConfig, *, draft_layers: int = 0):
        layers = (layer_of(config, kind) for kind in config.layer_types)
        rotary = Rotary(config.rope_parameters, config.rotated_columns)
        super().__init__(config, layers, rotary, norm=OnePlusRMSNorm)
        self.mtp = draft_layers_of(config, draft_layers)

    @classmethod
    def from_hf(cls, hf: JSONMapping, *, draft_layers: int = 0) -> Self:
        return super().from_hf(text_config(hf), draft_layers=draft_layers)
