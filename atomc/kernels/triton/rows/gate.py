"""The gate between the two products of an MLP or of an expert, as a part of Triton kernels."""

from typing import NamedTuple

import triton
import triton.language as tl
from triton.language import constexpr

from atomc.kernels.triton.rows.activation import gelu, gelu_tanh, silu


class GateConstants(NamedTuple):
    """How gate and up are joined; see atomc.ops.experts.gated."""

    activation: str
    interleaved: bool
    alpha: float
    limit: float | None


@triton.jit
def activated(gate, up, GATE: constexpr, DTYPE: constexpr):
    """atomc.ops.experts.gated of gate and up in DTYPE, in DTYPE, with the same roundings."""
    gate, up = gate.to(tl.float32), up.to(tl.float32)
    if GATE.limit is not None:
        gate = tl.minimum(gate, GATE.limit, tl.PropagateNan.ALL).to(DTYPE).to(tl.float32)
        up = tl.clamp(up, -GATE.limit, GATE.limit, tl.PropagateNan.ALL).to(DTYPE).to(tl.float32)
    if GATE.activation == "silu":
        value = silu(gate, DTYPE)
    elif GATE.activation == "gelu":
        value = gelu(gate, DTYPE)
    elif GATE.activation == "gelu_tanh":
        value = gelu_tanh(gate)
    else:
        scaled = (gate * GATE.alpha).to(DTYPE).to(tl.float32)
        value = gate * tl.sigmoid(scaled).to(DTYPE).to(tl.float32)
        up = (up + 1.0).to(DTYPE).to(tl.float32)
    return (value.to(DTYPE).to(tl.float32) * up).to(DTYPE)
