"""The short convolutions of transformers' classes (LFM2) through ops.causal_conv1d.

A class is recognized by what it computes: a small one of it is compared with the op on random
numbers.
"""

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from atomc import ops
from atomc.models.entered_layers import enter, unknown_parameters, why_unlike

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

LAYER_TYPE = "conv"  # of such layers in config.layer_types
OP = "ops.causal_conv1d"
MODULES = ("in_proj", "conv", "out_proj")
KNOWN = frozenset(f"{name}.{part}" for name in MODULES for part in ("weight", "bias"))
WIDTH, TOKENS = 24, 12  # of the compared one


def _is_short_conv(module: nn.Module) -> bool:
    parts = module._modules
    return (
        hasattr(module, "layer_idx")
        and set(MODULES) == parts.keys()
        and isinstance(parts["conv"], nn.Conv1d)
    )


def enter_short_convs(hf_model: "PreTrainedModel") -> int:
    """Have its short convolutions call ops.causal_conv1d while its attention implementation is
    "atom", in place. Returns how many it has.

    Raises ValueError for one that computes something else than the op.
    """
    found: list[Any] = [module for module in hf_model.modules() if _is_short_conv(module)]
    config = hf_model.config.get_text_config()
    for cls in {type(module) for module in found}:
        layer_idx = next(module.layer_idx for module in found if type(module) is cls)
        if reason := _why_unlike(cls, config, layer_idx):
            raise ValueError(f"{type(hf_model).__name__}: {cls.__name__} {reason}")
    for module in found:
        channels, _, taps = module.conv.weight.shape
        module.conv_state = ops.conv_state(channels, taps).to(hf_model.device, hf_model.dtype)
        enter(module, config, mix)
    return len(found)


def mix(layer: Any, x: Tensor) -> Tensor:
    """What the layer makes of x [B, T, D] -> [B, T, D]: a convolution between two gates."""
    before, after, inputs = layer.in_proj(x).chunk(3, -1)
    state = getattr(layer, "conv_state", None)
    convolved = ops.causal_conv1d(
        before * inputs, layer.conv.weight.squeeze(1), layer.conv.bias, state, activation="none"
    )
    mixed: Tensor = layer.out_proj(after * convolved)
    return mixed


def _why_unlike(cls: type[Any], config: "PretrainedConfig", layer_idx: int) -> str:
    """Why a class is not what the op computes; "" if it is."""
    small = copy.deepcopy(config)
    small.hidden_size = WIDTH
    try:
        with torch.device("cpu"):
            layer = cls(small, layer_idx).float().eval()
    except Exception as error:  # code of others
        return f"cannot be compared with {OP}: {type(error).__name__}: {error}"
    return unknown_parameters(layer, KNOWN, OP) or why_unlike(layer, WIDTH, TOKENS, mix, OP)
