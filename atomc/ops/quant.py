"""Quantization of activations to codes and scales: x is approximately code * scale.

K columns; a group is a run of columns with a common scale. All computation is in fp32. A dynamic
scale is amax * (1 / largest), with an amax of at least AMAX_FLOOR (a product, because torch divides
by a number on a CPU and multiplies by its reciprocal on a GPU). Values are multiplied by the
reciprocal of the scale (one division per scale, not per value), clamped to the largest number, and
rounded to nearest even. A group with an infinity or NaN has a scale that is not finite, so that it
is never dequantized to finite numbers (a static scale saturates infinities).
"""

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from atomc.ops.formats import (
    AMAX_FLOOR,
    FP8,
    MX_ROUNDINGS,
    e2m1_codes,
    e8m0_scales,
    e8m0_values,
    grouped_columns,
    pack_e2m1,
)
from atomc.ops.op import op
from atomc.ops.op_traits import Kind

INT8_MAX = 127.0


def rounded_fp8(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x (fp32) clamped and rounded to fp8. Raises ValueError for another dtype."""
    if dtype not in FP8:
        raise ValueError(f"fp8 dtype {dtype} is not one of {FP8}")
    largest = torch.finfo(dtype).max
    return x.clamp(-largest, largest).to(dtype)


@op(kind=Kind.QUANTIZE, rows=None, shape=lambda x, dtype: x.new_empty(x.shape, dtype=dtype))
def quant_fp8_static(x: Tensor, scale: Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> Tensor:
    """x / scale in fp8, with a given scale. x [..., K], scale [1] fp32 -> [..., K] fp8."""
    return rounded_fp8(x.to(torch.float32) * (1.0 / scale.to(torch.float32)), dtype).contiguous()


def _per_token_shape(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=dtype), x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)


def _dynamic_scale(x: Tensor, largest: float) -> Tensor:
    """The scale of each row of x (fp32) for codes up to `largest`, [..., 1]."""
    return x.abs().amax(-1, keepdim=True).clamp(min=AMAX_FLOOR) * (1.0 / largest)


@op(kind=Kind.QUANTIZE, rows=None, shape=_per_token_shape)
def quant_fp8_per_token(
    x: Tensor, dtype: torch.dtype = torch.float8_e4m3fn
) -> tuple[Tensor, Tensor]:
    """fp8 with one scale per row. x [..., K] -> codes [..., K] fp8 and scales [..., 1] fp32."""
    x_f32 = x.to(torch.float32)
    scale = _dynamic_scale(x_f32, torch.finfo(dtype).max)
    return rounded_fp8(x_f32 * (1.0 / scale), dtype).contiguous(), scale.contiguous()


def empty_group_scales(x: Tensor, groups: int, column_major: bool) -> Tensor:
    """An uninitialized fp32 tensor [..., groups] with contiguous rows or columns."""
    rows = math.prod(x.shape[:-1])
    if column_major:
        return x.new_empty((groups, rows), dtype=torch.float32).t().view(*x.shape[:-1], groups)
    return x.new_empty((*x.shape[:-1], groups), dtype=torch.float32)


def _quant_fp8_group_shape(
    x: Tensor, group: int, column_major_scales: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    groups = -(-x.shape[-1] // group)
    return x.new_empty(x.shape, dtype=dtype), empty_group_scales(x, groups, column_major_scales)


@op(kind=Kind.QUANTIZE, rows=None, shape=_quant_fp8_group_shape)
def quant_fp8_group(
    x: Tensor,
    group: int = 128,
    column_major_scales: bool = False,
    dtype: torch.dtype = torch.float8_e4m3fn,
) -> tuple[Tensor, Tensor]:
    """fp8 with one scale per `group` columns of a row; the last group may be shorter (DeepSeek-V3,
    section 3.3.2).

    x [..., K] -> codes [..., K] fp8 and scales [..., ceil(K / group)] fp32. column_major_scales:
    the scales of one group are contiguous, as some GEMMs require; the shape is the same.
    """
    width = x.shape[-1]
    groups = -(-width // group)
    padded = grouped_columns(F.pad(x.to(torch.float32), (0, groups * group - width)), group)
    scale = _dynamic_scale(padded, torch.finfo(dtype).max)
    q = rounded_fp8(padded * (1.0 / scale), dtype).flatten(-2)[..., :width].contiguous()
    return q, empty_group_scales(x, groups, column_major_scales).copy_(scale.squeeze(-1))


def _quant_mxfp4_shape(x: Tensor) -> tuple[Tensor, Tensor]:
    lead, width = x.shape[:-1], x.shape[-1]
    return x.new_empty((*lead, width // 2), dtype=torch.uint8), x.new_empty(
        (*lead, width // 32), dtype=torch.uint8
    )


@op(kind=Kind.QUANTIZE, rows=None, shape=_quant_mxfp4_shape)
def quant_mxfp4(x: Tensor, rounding: str = "even") -> tuple[Tensor, Tensor]:
    """MXFP4: e2m1 with one e8m0 scale per 32 columns (OCP Microscaling v1.0, section 6.3).

    x [..., K], K a multiple of 32 -> codes [..., K/2] uint8, two per byte, and scales [..., K/32]
    uint8. The scale is the largest power of two <= amax / 4, or the next one if amax exceeds a
    threshold that depends on `rounding` (atomc.ops.formats.MX_ROUNDINGS). Raises ValueError for
    another rounding or K.
    """
    if rounding not in MX_ROUNDINGS:
        raise ValueError(f"quant_mxfp4: rounding {rounding!r} is not one of {tuple(MX_ROUNDINGS)}")
    if x.shape[-1] % 32:
        raise ValueError(f"quant_mxfp4: {x.shape[-1]} columns are not a multiple of 32")
    blocks = grouped_columns(x.to(torch.float32), 32)
    scale = e8m0_scales(blocks.abs().amax(-1), rounding)
    # 254 - code is the code of the reciprocal, except for NaN, which only the scale keeps.
    inverse = e8m0_values((254 - scale.to(torch.int32)).clamp(min=0).to(torch.uint8))
    return pack_e2m1(
        e2m1_codes(blocks * inverse.unsqueeze(-1)).flatten(-2)
    ).contiguous(), scale.contiguous()


@op(kind=Kind.QUANTIZE, rows=None, shape=partial(_per_token_shape, dtype=torch.int8))
def quant_int8_per_token(x: Tensor) -> tuple[Tensor, Tensor]:
    """int8, -127..127, with one scale per row. x [..., K] -> codes [..., K] int8 and scales
    [..., 1] fp32.
    """
    x_f32 = x.to(torch.float32)
    scale = _dynamic_scale(x_f32, INT8_MAX)
    q = (x_f32 * (1.0 / scale)).round().clamp(-INT8_MAX, INT8_MAX)
    return q.to(torch.int8).contiguous(), scale.contiguous()
