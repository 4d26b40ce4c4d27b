"""Quantizers by AITER's HIP kernels: fp8, and MXFP4 whose scales are rounded up.

Not int8, which AITER truncates toward zero where the op rounds to nearest.
"""

import torch
from torch import Tensor

from atomc import ops
from atomc.kernels.aiter.library import (
    Function,
    dense_rows,
    foreign_codes,
    installed,
)
from atomc.kernels.aiter.linear.packing import e2m1_view, e8m0_view
from atomc.kernels.checks import first_refusal, uneven, unlike
from atomc.kernels.row_views import with_lead
from atomc.ops.formats import HALVES
from atomc.ops.op import Refusal

static_per_tensor_quant = Function("static_per_tensor_quant", "aiter")
dynamic_per_token_scaled_quant = Function(
    "dynamic_per_token_scaled_quant", "aiter", takes=["shuffle_scale"]
)
dynamic_per_group_scaled_quant_fp4 = Function(
    "dynamic_per_group_scaled_quant_fp4", "aiter", takes=["group_size", "shuffle_scale"]
)


# The kernels store whole dwords: a row that does not end on one would end in the next row.
STORED_CODES = 4


def _rows_of_halves(x: Tensor) -> Refusal | None:
    if not isinstance(x.shape[-1], int):
        return Refusal("shape", "the rows of x have no fixed width")
    return unlike(HALVES, x=x) or uneven(x.shape[-1], STORED_CODES)


refuse_static = first_refusal(installed(static_per_tensor_quant), foreign_codes, _rows_of_halves)


@ops.quant_fp8_static.kernel("aiter", refuses=refuse_static)
def quant_fp8_static(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    flat = dense_rows(x)
    codes = torch.empty_like(flat, dtype=dtype)
    if x.numel():
        static_per_tensor_quant(codes, flat, scale)
    return codes.view(x.shape)


refuse_per_token = first_refusal(
    installed(dynamic_per_token_scaled_quant), foreign_codes, _rows_of_halves
)


@ops.quant_fp8_per_token.kernel("aiter", refuses=refuse_per_token)
def quant_fp8_per_token(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    flat = dense_rows(x)
    codes = torch.empty_like(flat, dtype=dtype)
    scales = flat.new_empty((flat.shape[0], 1), dtype=torch.float32)
    if x.numel():
        dynamic_per_token_scaled_quant(codes, flat, scales)
    return codes.view(x.shape), with_lead(scales, x)


def _partial_groups(x: Tensor, group: int) -> Refusal | None:
    if group not in (32, 64, 128) or x.shape[-1] % group:
        return Refusal(
            "shape",
            f"groups of {group} in rows of {x.shape[-1]}: AITER's kernel takes whole groups of "
            "32, 64 or 128",
        )
    return None


refuse_group = first_refusal(refuse_per_token, _partial_groups)


@ops.quant_fp8_group.kernel("aiter", refuses=refuse_group)
def quant_fp8_group(
    x: Tensor, group: int, column_major_scales: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    flat, groups = dense_rows(x), x.shape[-1] // group
    codes = torch.empty_like(flat, dtype=dtype)
    lead = (groups, flat.shape[0]) if column_major_scales else (flat.shape[0], groups)
    scales = flat.new_empty(lead, dtype=torch.float32)
    if x.numel():
        dynamic_per_token_scaled_quant(
            codes, flat.view(-1, group), scales, shuffle_scale=column_major_scales
        )
    rows = scales.t() if column_major_scales else scales
    return codes.view(x.shape), with_lead(rows, x)


def _other_rounding(rounding: str) -> Refusal | None:
    if rounding != "up":
        return Refusal(
            "argument", f"AITER's compiled kernel rounds scales up, here rounding={rounding!r}"
        )
    return None


refuse_mxfp4 = first_refusal(
    installed(dynamic_per_group_scaled_quant_fp4),
    _rows_of_halves,
    _other_rounding,
)


@ops.quant_mxfp4.kernel("aiter", refuses=refuse_mxfp4)
def quant_mxfp4(x: Tensor) -> tuple[Tensor, Tensor]:
    flat = dense_rows(x)
    codes = flat.new_empty((flat.shape[0], flat.shape[1] // 2), dtype=torch.uint8)
    scales = flat.new_empty((flat.shape[0], flat.shape[1] // 32), dtype=torch.uint8)
    if x.numel():
        dynamic_per_group_scaled_quant_fp4(
            e2m1_view(codes), flat, e8m0_view(scales), group_size=32, shuffle_scale=False
        )
    return with_lead(codes, x), with_lead(scales, x)
