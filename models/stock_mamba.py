"""The Mamba-2 mixers of transformers' classes (Mamba2, Granite 4, Bamba, Falcon H1, Nemotron H,
Zamba2) through ops.causal_conv1d and ops.ssm_scan.

A class is recognized by what it computes: a small one of it is compared with the ops on random
numbers.
"""

import copy
import math
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atomc import ops
from atomc.models.entered_layers import enter, unknown_parameters, why_unlike

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

OPS = "ops.causal_conv1d and ops.ssm_scan"
MODULES, PARAMETERS = ("in_proj", "conv1d", "out_proj"), ("A_log", "D", "dt_bias")
KNOWN = frozenset(
    {
        *PARAMETERS,
        "norm.weight",
        *(f"{name}.{part}" for name in MODULES for part in ("weight", "bias")),
    }
)
# Sizes of the compared one, by each name that a config has for it: 4 heads of 12 columns in 2
# groups, and more tokens than a chunk.
SMALL = {
    **dict.fromkeys(("hidden_size",), 24),
    **dict.fromkeys(("mamba_expand", "expand"), 2),
    **dict.fromkeys(("mamba_d_ssm",), 48),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "n_mamba_heads", "num_heads"), 4),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim", "mamba_headdim", "head_dim"), 12),
    **dict.fromkeys(("mamba_n_groups", "n_groups", "mamba_ngroups"), 2),
    **dict.fromkeys(("mamba_d_state", "ssm_state_size", "state_size"), 6),
    **dict.fromkeys(("mamba_chunk_size", "chunk_size"), 8),
}
TOKENS = 20


def is_mixer(module: nn.Module) -> bool:
    return (
        hasattr(module, "layer_idx")
        and all(name in module._modules for name in MODULES)
        and all(name in module._parameters for name in PARAMETERS)
    )


def enter_mixers(hf_model: "PreTrainedModel") -> int:
    """Have its Mamba-2 mixers call ops while its attention implementation is "atom", in place.
    Returns how many it has.

    Raises ValueError for one that computes something else than the ops.
    """
    found: list[Any] = [module for module in hf_model.modules() if is_mixer(module)]
    config = hf_model.config.get_text_config()
    for cls in {type(module) for module in found}:
        layer_idx = next(module.layer_idx for module in found if type(module) is cls)
        if reason := _why_unlike(cls, config, layer_idx):
            raise ValueError(f"{type(hf_model).__name__}: {cls.__name__} {reason}")
    for module in found:
        channels, _, taps = module.conv1d.weight.shape
        where = (hf_model.device, hf_model.dtype)
        module.conv_state = ops.conv_state(channels, taps).to(*where)
        module.ssm_state = ops.ssm_state(
            module.num_heads, module.head_dim, module.ssm_state_size
        ).to(*where)
        enter(module, config, mix)
    return len(found)


def mix(mixer: Any, x: Tensor) -> Tensor:
    """What the mixer makes of x [B, T, D] -> [B, T, D]."""
    heads, groups = mixer.num_heads, mixer.n_groups
    inner, of_groups = mixer.intermediate_size, groups * mixer.ssm_state_size
    z, xbc, dt = torch.split(_projected(mixer, x), [inner, inner + 2 * of_groups, heads], -1)
    xbc = ops.causal_conv1d(
        xbc,
        mixer.conv1d.weight.squeeze(1),
        mixer.conv1d.bias,
        getattr(mixer, "conv_state", None),
        activation="silu",
    )
    values, b, c = torch.split(xbc, [inner, of_groups, of_groups], -1)
    least, most = mixer.time_step_limit
    out = ops.ssm_scan(
        torch.unflatten(values, -1, (heads, -1)),
        dt,
        mixer.A_log,
        torch.unflatten(b, -1, (groups, -1)),
        torch.unflatten(c, -1, (groups, -1)),
        mixer.D,
        mixer.dt_bias,
        getattr(mixer, "ssm_state", None),
        dt_min=float(least),
        dt_max=None if math.isinf(most) else float(most),
    ).flatten(-2)
    ungated = isinstance(getattr(mixer, "norm", None), nn.Identity)
    gated = out * F.silu(z) if ungated else mixer.norm(out, z)
    mixed: Tensor = mixer.out_proj(gated.to(x.dtype))
    return mixed


def _projected(mixer: Any, x: Tensor) -> Tensor:
    """z, the input of the convolution and dt, side by side."""
    if hasattr(mixer, "ssm_in_multiplier"):  # Falcon H1
        scaled: Tensor = mixer.in_proj(x * mixer.ssm_in_multiplier) * mixer.mup_vector
        return scaled
    projected: Tensor = mixer.in_proj(x)
    return projected


def _why_unlike(cls: type[Any], config: "PretrainedConfig", layer_idx: int) -> str:
    """Why a class is not what the ops compute; "" if it is."""
    small = copy.deepcopy(config)
    for name, value in SMALL.items():
        if hasattr(small, name):
            setattr(small, name, value)
    try:
        with torch.device("cpu"):
            mixer = cls(small, layer_idx).float().eval()
            if hasattr(mixer, "ssm_in_multiplier"):  # which the model gives its layers
                mixer.mup_vector = nn.Buffer(torch.ones(1, 1, mixer.in_proj.out_features))
    except Exception as error:  # code of others
        return f"cannot be compared with {OPS}: {type(error).__name__}: {error}"
    if mixer.activation not in ("silu", "swish"):
        return (
            f"has the activation {mixer.activation!r} behind its convolution, supported is 'silu'"
        )
    unknown = unknown_parameters(mixer, KNOWN, OPS)
    return unknown or why_unlike(mixer, SMALL["hidden_size"], TOKENS, mix, OPS)
