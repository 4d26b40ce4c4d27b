"""Gated activations with a quantized result (quantizers: atomc.ops.schemes)."""

from typing import Unpack

import torch
from torch import Tensor

from atomc.ops.activation import silu_and_mul
from atomc.ops.op import op
from atomc.ops.op_traits import Kind
from atomc.ops.schemes import SchemeArguments, quantized


def _silu_and_mul_quant_shape(
    gate: Tensor, up: Tensor, scale: Tensor | None, **scheme: Unpack[SchemeArguments]
) -> tuple[Tensor, Tensor]:
    y = gate.new_empty(gate.shape, dtype=torch.result_type(gate, up))
    return quantized(y, scale, shape_only=True, **scheme)


@op(kind=Kind.GATE | Kind.QUANTIZE, rows=None, shape=_silu_and_mul_quant_shape)
def silu_and_mul_quant(
    gate: Tensor,
    up: Tensor,
    scale: Tensor | None = None,
    **scheme: Unpack[SchemeArguments],
) -> tuple[Tensor, Tensor]:
    """The codes and scales of silu_and_mul(gate, up), which is rounded to its dtype before it is
    quantized. Both [..., I]; scale [1] fp32 for fp8_static, else None. Results: atomc.ops.schemes.
    """
    return quantized(silu_and_mul.reference(gate, up), scale, **scheme)
