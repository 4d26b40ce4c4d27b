"""The Mamba-2 mixers of transformers' classes (Mamba2, Granite 4, Bamba, Falcon H1, Nemotron H,
Zamba2) through ops.causal_conv1d and ops.ssm_scan.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atomc import ops
from atomc.stock.replaced_forwards import Handles, LayerKind

MODULES, PARAMETERS = ("in_proj", "conv1d", "out_proj"), ("A_log", "D", "dt_bias")
KNOWN = frozenset(
    {
        *PARAMETERS,
        "norm.weight",
        *(f"{name}.{part}" for name in MODULES for part in ("weight", "bias")),
    }
)
# Sizes of the compared one, by each name that a config has for it: 4 heads of 12 columns in 2
# groups.
SMALL = {
    "hidden_size": 24,
    **dict.fromkeys(("mamba_expand", "expand"), 2),
    "mamba_d_ssm": 48,
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "n_mamba_heads", "num_heads"), 4),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim", "mamba_headdim", "head_dim"), 12),
    **dict.fromkeys(("mamba_n_groups", "n_groups", "mamba_ngroups"), 2),
    **dict.fromkeys(("mamba_d_state", "ssm_state_size", "state_size"), 6),
    **dict.fromkeys(("mamba_chunk_size", "chunk_size"), 8),
}


def is_mixer(module: nn.Module) -> bool:
    return (
        hasattr(module, "layer_idx")
        and all(name in module._modules for name in MODULES)
        and all(name in module._parameters for name in PARAMETERS)
    )


def _handles(mixer: Any) -> Handles:
    channels, _, taps = mixer.conv1d.weight.shape
    return {
        "conv_state": ops.conv_state(channels, taps),
        "ssm_state": ops.ssm_state(mixer.num_heads, mixer.head_dim, mixer.ssm_state_size),
    }


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


def _complete(mixer: Any) -> None:
    if hasattr(mixer, "ssm_in_multiplier"):  # Falcon H1, whose model gives its layers the other one
        mixer.mup_vector = nn.Buffer(torch.ones(1, 1, mixer.in_proj.out_features))


MIXERS = LayerKind(
    is_mixer,
    mix,
    "ops.causal_conv1d and ops.ssm_scan",
    _handles,
    lambda _: KNOWN,
    sizes=SMALL,
    tokens=20,
    complete=_complete,
)
