"""Gated activations by AITER's HIP kernels: gate and up side by side in one tensor, computed in
fp32, rounded once.
"""

from torch import Tensor

from atomc import ops
from atomc.kernels.aiter.library import (
    Function,
    installed,
    neighbours,
    side_by_side,
    unfit,
)
from atomc.kernels.checks import first_refusal, uneven, unlike
from atomc.ops.formats import HALVES
from atomc.ops.op import Refusal

aiter_silu_and_mul = Function("silu_and_mul", "aiter")
GELUS = {
    "none": Function("gelu_and_mul", "aiter"),
    "tanh": Function("gelu_tanh_and_mul", "aiter"),
}


def apart(gate: Tensor, up: Tensor) -> Refusal | None:
    """Why the two are not halves of one tensor's rows, or None."""
    if neighbours(gate, up):
        return None
    return Refusal(
        "layout",
        "gate and up do not lie side by side in one tensor, as a merged projection leaves them",
    )


def halves_of_rows(gate: Tensor, up: Tensor) -> Refusal | None:
    """The kernels store whole dwords, so that a row of an odd width would end in the next one."""
    return unlike(HALVES, gate=gate) or apart(gate, up) or uneven(gate.shape[-1], 2)


def _gated(function: Function, gate: Tensor, up: Tensor) -> Tensor:
    packed = side_by_side(gate, up)
    out = gate.new_empty((packed.shape[0], gate.shape[-1]))
    if gate.numel():
        function(out, packed)
    return out.view(gate.shape)


@ops.silu_and_mul.kernel(
    "aiter",
    refuses=first_refusal(installed(aiter_silu_and_mul), halves_of_rows),
    rounds="once",
)
def silu_and_mul(gate: Tensor, up: Tensor) -> Tensor:
    return _gated(aiter_silu_and_mul, gate, up)


@ops.gelu_and_mul.kernel(
    "aiter",
    refuses=first_refusal(
        lambda platform, approximate: unfit(platform, GELUS[approximate]), halves_of_rows
    ),
    rounds="once",
)
def gelu_and_mul(gate: Tensor, up: Tensor, approximate: str) -> Tensor:
    return _gated(GELUS[approximate], gate, up)
