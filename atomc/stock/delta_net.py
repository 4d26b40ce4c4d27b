"""The gated delta nets of transformers' classes (Qwen3-Next, Qwen3.5, OLMo Hybrid) through
ops.causal_conv1d and ops.gated_delta_rule.

The loop over chunks that such a class has depends on the number of tokens, so a layer is entered at
its forward: its parts stay, and it gets state handles.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from atomc import ops
from atomc.models.gated_delta_net import Projected, recur
from atomc.models.qwen3_5 import SplitDeltaNet
from atomc.models.qwen3_next import PackedDeltaNet
from atomc.stock.replaced_forwards import Handles, LayerKind

LAYER_TYPE = "linear_attention"  # of such layers in config.layer_types
RECURRENCE = ("conv1d.weight", "conv1d.bias", "A_log", "dt_bias")
SMALL = {
    "hidden_size": 24,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 10,
}


def _separate(layer: Any, x: Tensor) -> Projected:
    """OLMo Hybrid, whose state may have negative eigenvalues."""
    qkv = torch.cat([layer.q_proj(x), layer.k_proj(x), layer.v_proj(x)], -1)
    z = layer.g_proj(x).unflatten(-1, (-1, layer.head_v_dim))
    beta = layer.b_proj(x).sigmoid()
    if layer.allow_neg_eigval:
        beta = beta * 2.0
    return Projected(qkv, z, beta, layer.a_proj(x))


# Names of the projections, of the norm and of the last projection.
OUT = ("norm", "out_proj")
SPELLINGS: dict[tuple[str, ...], Callable[[Any, Tensor], Projected]] = {
    ("in_proj_qkvz", "in_proj_ba", *OUT): PackedDeltaNet.project,
    ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", *OUT): SplitDeltaNet.project,
    ("q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "a_proj", "o_norm", "o_proj"): _separate,
}


def spelling_of(module: nn.Module) -> tuple[str, ...] | None:
    """The names of its parts in SPELLINGS; None for a module that is no gated delta net."""
    children = module._modules
    if "conv1d" not in children or not all(x in module._parameters for x in ("A_log", "dt_bias")):
        return None
    return next((names for names in SPELLINGS if all(name in children for name in names)), None)


def mix(layer: Any, x: Tensor) -> Tensor:
    """What the layer makes of x [B, T, D] -> [B, T, D]."""
    spelling = spelling_of(layer)
    assert spelling is not None
    projected = SPELLINGS[spelling](layer, x)
    states = (getattr(layer, name, None) for name in ("conv_state", "delta_state"))
    out = recur(layer, projected, *states)
    *_, norm, out_proj = (getattr(layer, name) for name in spelling)
    # As rows: with transformers' kernels the norm may be one that needs them.
    rows = norm(out.flatten(0, -2), projected.z.flatten(0, -2))
    mixed: Tensor = out_proj(rows.view(out.shape).flatten(-2))
    return mixed


def _handles(layer: Any) -> Handles:
    channels, _, taps = layer.conv1d.weight.shape
    heads = len(layer.A_log)
    return {
        "conv_state": ops.conv_state(channels, taps),
        "delta_state": ops.delta_state(heads, layer.head_k_dim, layer.head_v_dim),
    }


def _parameters(layer: nn.Module) -> Iterable[str]:
    parts = (f"{name}.weight" for name in spelling_of(layer) or ())
    return (*RECURRENCE, *parts)


def is_delta_net(module: nn.Module) -> bool:
    return spelling_of(module) is not None


DELTA_NETS = LayerKind(
    is_delta_net,
    mix,
    "ops.causal_conv1d and ops.gated_delta_rule",
    _handles,
    _parameters,
    SMALL,
    tokens=70,
    masks=True,
)
