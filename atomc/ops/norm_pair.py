"""Two RMSNorms of tensors with the same rows in one op, alone and with quantized results: those of
the latents of queries and of keys and values (DeepSeek-V2, section 2.1), of one product.

x [..., X], y [..., Y], x_weight [X], y_weight [Y].
"""

from typing import Unpack

from torch import Tensor

from atomc.ops.norm import norm_op, normed_shape, rms_norm
from atomc.ops.norm_quant import rms_norm_quant, rms_norm_quant_shape
from atomc.ops.op_traits import Kind
from atomc.ops.schemes import SchemeArguments


def _rms_norm_pair_shape(
    x: Tensor, y: Tensor, x_weight: Tensor, y_weight: Tensor, style: str
) -> tuple[Tensor, Tensor]:
    return normed_shape(x, x_weight, style), normed_shape(y, y_weight, style)


@norm_op(kind=Kind.NORM, shape=_rms_norm_pair_shape)
def rms_norm_pair(
    x: Tensor, y: Tensor, x_weight: Tensor, y_weight: Tensor, eps: float, style: str = "after"
) -> tuple[Tensor, Tensor]:
    """rms_norm(x, x_weight) and rms_norm(y, y_weight) -> [..., X], [..., Y]."""
    return (
        rms_norm.reference(x, x_weight, eps, style),
        rms_norm.reference(y, y_weight, eps, style),
    )


def _rms_norm_pair_quant_shape(
    x: Tensor,
    y: Tensor,
    x_weight: Tensor,
    y_weight: Tensor,
    x_scale: Tensor | None,
    y_scale: Tensor | None,
    style: str,
    quantize_y: bool,
    keep_x: bool,
    keep_y: bool,
    **scheme: Unpack[SchemeArguments],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    x_parts = rms_norm_quant_shape(x, x_weight, x_scale, style, keep=keep_x, **scheme)
    y_parts = (
        rms_norm_quant_shape(y, y_weight, y_scale, style, keep=keep_y, **scheme)
        if quantize_y
        else (y.new_empty(0), y.new_empty(0), normed_shape(y, y_weight, style))
    )
    return *x_parts[:2], *y_parts[:2], x_parts[2], y_parts[2]


@norm_op(
    kind=Kind.NORM | Kind.QUANTIZE,
    shape=_rms_norm_pair_quant_shape,
)
def rms_norm_pair_quant(
    x: Tensor,
    y: Tensor,
    x_weight: Tensor,
    y_weight: Tensor,
    eps: float,
    x_scale: Tensor | None = None,
    y_scale: Tensor | None = None,
    style: str = "after",
    *,
    quantize_y: bool = True,
    keep_x: bool = False,
    keep_y: bool = False,
    **scheme: Unpack[SchemeArguments],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """rms_norm_quant(x, x_weight) and, if quantize_y, rms_norm_quant(y, y_weight), else
    rms_norm(y, y_weight) -> codes and scales of x, codes and scales of y, norm of x, norm of y.

    keep_x, keep_y: the norm is returned, too. What is not returned is empty, [0]. x_scale and
    y_scale [1] fp32 for fp8_static, else None.
    """
    quantized = rms_norm_quant.reference
    x_parts = quantized(x, x_weight, eps, x_scale, style, keep=keep_x, **scheme)
    y_parts = (
        quantized(y, y_weight, eps, y_scale, style, keep=keep_y, **scheme)
        if quantize_y
        else (y.new_empty(0), y.new_empty(0), rms_norm.reference(y, y_weight, eps, style))
    )
    return *x_parts[:2], *y_parts[:2], x_parts[2], y_parts[2]
