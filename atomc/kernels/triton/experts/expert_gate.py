"""The gate between the two products of an expert, as a part of Triton kernels."""

import triton
import triton.language as tl

from atomc.kernels.triton.rows.activation import gelu, gelu_tanh, silu


@triton.jit
def activated(gate, up, alpha, limit, ACTIVATION: tl.constexpr, DTYPE: tl.constexpr):
    """atomc.ops.experts.gated of gate and up in DTYPE, in DTYPE, with the same roundings."""
    gate, up = gate.to(tl.float32), up.to(tl.float32)
    if limit is not None:
        gate = tl.minimum(gate, limit, tl.PropagateNan.ALL).to(DTYPE).to(tl.float32)
        up = tl.clamp(up, -limit, limit, tl.PropagateNan.ALL).to(DTYPE).to(tl.float32)
    if ACTIVATION == "silu":
        value = silu(gate, DTYPE)
    elif ACTIVATION == "gelu":
        value = gelu(gate)
    elif ACTIVATION == "gelu_tanh":
        value = gelu_tanh(gate)
    else:
        scaled = (gate * alpha).to(DTYPE).to(tl.float32)
        value = gate * tl.sigmoid(scaled).to(DTYPE).to(tl.float32)
        up = (up + 1.0).to(DTYPE).to(tl.float32)
    return (value.to(DTYPE).to(tl.float32) * up).to(DTYPE)
