"""RMSNorm with a quantized result, alone and after a residual add.

The result of the norm is rounded to its dtype before it is quantized, as by the two separate ops.
`keep`: the unquantized norm is returned, too; without it that output is empty, [0]. Shapes and
dtypes of codes and scales depend on the scheme: atomc.ops.schemes.
"""

from typing import Unpack

import torch
from torch import Tensor

from atomc.ops.norm import norm_op, normed_shape, rms_norm
from atomc.ops.op_traits import Kind
from atomc.ops.schemes import KeptScheme, SchemeArguments, quantized


class QuantizedNorm(KeptScheme):
    """The arguments of rms_norm_quant besides x."""

    weight: Tensor
    eps: float
    scale: Tensor | None
    style: str


def rms_norm_quant_shape(
    x: Tensor, weight: Tensor, scale: Tensor | None, style: str, **how: Unpack[KeptScheme]
) -> tuple[Tensor, Tensor, Tensor]:
    """Empty tensors as `rms_norm_quant` returns them."""
    return _quantized(normed_shape(x, weight, style), scale, shape_only=True, **how)


def _quantized(
    y: Tensor,
    scale: Tensor | None,
    keep: bool = False,
    shape_only: bool = False,
    **scheme: Unpack[SchemeArguments],
) -> tuple[Tensor, Tensor, Tensor]:
    codes, scales = quantized(y, scale, shape_only=shape_only, **scheme)
    return codes, scales, y if keep else y.new_empty(0)


@norm_op(kind=Kind.NORM | Kind.QUANTIZE, shape=rms_norm_quant_shape)
def rms_norm_quant(
    x: Tensor,
    weight: Tensor,
    eps: float,
    scale: Tensor | None = None,
    style: str = "after",
    **how: Unpack[KeptScheme],
) -> tuple[Tensor, Tensor, Tensor]:
    """The codes and scales of rms_norm(x, weight, eps, style), and that norm [..., D] if `keep`. x
    [..., D], weight [D]; scale [1] fp32 for fp8_static, else None.
    """
    return _quantized(rms_norm.reference(x, weight, eps, style), scale, **how)


def _add_rms_norm_quant_shape(
    x: Tensor, weight: Tensor, scale: Tensor | None, style: str, **how: Unpack[KeptScheme]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    total = torch.empty_like(x)
    codes, scales, y = rms_norm_quant_shape(total, weight, scale, style, **how)
    return codes, scales, total, y


@norm_op(
    kind=Kind.NORM | Kind.QUANTIZE,
    shape=_add_rms_norm_quant_shape,
)
def add_rms_norm_quant(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    scale: Tensor | None = None,
    style: str = "after",
    **how: Unpack[KeptScheme],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """rms_norm_quant of x + residual -> codes, scales, the sum [..., D], and the norm [..., D] if
    `keep`. x and residual [..., D], weight [D]; scale as in rms_norm_quant.
    """
    total = x + residual
    codes, scales, y = rms_norm_quant.reference(total, weight, eps, scale, style, **how)
    return codes, scales, total, y
