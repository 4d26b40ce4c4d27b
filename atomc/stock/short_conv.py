"""The short convolutions of transformers' classes (LFM2) through ops.causal_conv1d."""

from typing import Any

from torch import Tensor, nn

from atomc import ops
from atomc.stock.replaced_forwards import Handles, LayerKind

LAYER_TYPE = "conv"  # of such layers in config.layer_types
MODULES = ("in_proj", "conv", "out_proj")
PARAMETERS = [f"{name}.{part}" for name in MODULES for part in ("weight", "bias")]


def _is_short_conv(module: nn.Module) -> bool:
    parts = module._modules
    return (
        hasattr(module, "layer_idx")
        and set(MODULES) == parts.keys()
        and isinstance(parts["conv"], nn.Conv1d)
    )


def _handles(layer: Any) -> Handles:
    channels, _, taps = layer.conv.weight.shape
    return {"conv_state": ops.conv_state(channels, taps)}


def mix(layer: Any, x: Tensor) -> Tensor:
    """What the layer makes of x [B, T, D] -> [B, T, D]: a convolution between two gates."""
    before, after, inputs = layer.in_proj(x).chunk(3, -1)
    state = getattr(layer, "conv_state", None)
    convolved = ops.causal_conv1d(
        before * inputs, layer.conv.weight.squeeze(1), layer.conv.bias, state, activation="none"
    )
    mixed: Tensor = layer.out_proj(after * convolved)
    return mixed


SHORT_CONVS = LayerKind(
    _is_short_conv,
    mix,
    "ops.causal_conv1d",
    _handles,
    lambda _: PARAMETERS,
    sizes={"hidden_size": 24},
    tokens=12,
)
