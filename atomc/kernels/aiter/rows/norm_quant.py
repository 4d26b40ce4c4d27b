"""Norms whose result AITER's HIP kernels quantize: fp8 per token and in groups, MXFP4 with scales
rounded up.

The norm stays in fp32 until it is quantized.
"""

from typing import Unpack

import torch
from torch import Tensor

from atomc import ops
from atomc.kernels.aiter.library import Function, dense_rows, foreign_fp8, unfit
from atomc.kernels.aiter.linear.packing import e2m1_view, e8m0_view
from atomc.kernels.aiter.rows.norm import unfit_rows
from atomc.kernels.checks import uneven
from atomc.kernels.row_views import with_lead
from atomc.ops.norm_quant import QuantizedNorm
from atomc.ops.op import Refusal
from atomc.platform import Platform

rmsnorm_quant = Function(
    "rmsnorm_quant", "aiter", takes=["group_size", "shuffle_scale", "gemma_norm"]
)
add_rmsnorm_quant = Function(
    "add_rmsnorm_quant", "aiter", takes=["group_size", "shuffle_scale", "gemma_norm"]
)

# Wider than the first, up to the second: a thread has 24 columns, which make up no group, and
# AITER aborts.
GROUPLESS = (4096, 6144)
# The kernels store whole dwords: a row of codes that does not end on one would end in the next row.
STORED_CODES = 4
# Scheme -> what the kernel does instead.
UNSERVED = {
    "fp8_static": "finds its scale itself, here it is given",
    "int8_per_token": "truncates to int8, where the op rounds to nearest",
}


def _refuse(
    platform: Platform,
    x: Tensor,
    weight: Tensor,
    scheme: str,
    dtype: torch.dtype,
    group: int,
    rounding: str,
    keep: bool,
    residual: Tensor | None = None,
) -> Refusal | None:
    if reason := (
        unfit(platform, rmsnorm_quant if residual is None else add_rmsnorm_quant)
        or unfit_rows(x, residual, weight=weight)
        or uneven(x.shape[-1], STORED_CODES)
    ):
        return reason
    if keep:
        return Refusal(
            "argument", "AITER's compiled kernel does not write the norm besides its codes"
        )
    if scheme in UNSERVED:
        return Refusal("argument", f"AITER's compiled kernel {UNSERVED[scheme]}")
    if scheme in ("fp8_group", "mxfp4") and (reason := groupless(x.shape[-1])):
        return reason
    return unfit_codes(platform, x, scheme, dtype, group, rounding)


def groupless(width: int) -> Refusal | None:
    if GROUPLESS[0] < width <= GROUPLESS[1]:
        return Refusal(
            "shape",
            f"rows of {width}: AITER's compiled kernel forms no groups in rows of more than "
            f"{GROUPLESS[0]} columns, up to {GROUPLESS[1]}",
        )
    return None


def unfit_codes(
    platform: Platform, x: Tensor, scheme: str, dtype: torch.dtype, group: int, rounding: str
) -> Refusal | None:
    """Why AITER's HIP kernels do not quantize rows like x so."""
    if scheme.startswith("fp8") and (reason := foreign_fp8(platform, dtype)):
        return reason
    width = x.shape[-1]
    if scheme == "fp8_group" and (group not in (64, 128) or width % group):
        return Refusal(
            "shape",
            f"groups of {group} in rows of {width}: AITER's kernel takes whole groups of 64 or 128",
        )
    if scheme == "mxfp4" and rounding != "up":
        return Refusal(
            "argument",
            f"AITER's compiled kernel rounds the scales of MXFP4 up, here rounding={rounding!r}",
        )
    return None


def empty_outputs(
    flat: Tensor, scheme: str, dtype: torch.dtype, group: int, by_column: bool
) -> tuple[Tensor, Tensor, int]:
    """Codes and scales to be written, and AITER's size of a group (0: the row). Scales that lie
    column by column are [groups, rows].
    """
    count, width = flat.shape
    if scheme == "mxfp4":
        codes = flat.new_empty((count, width // 2), dtype=torch.uint8)
        return codes, flat.new_empty((count, width // 32), dtype=torch.uint8), 32
    codes = flat.new_empty((count, width), dtype=dtype)
    size = group if scheme == "fp8_group" else 0
    groups = width // group if size else 1
    shape = (groups, count) if by_column else (count, groups)
    return codes, flat.new_empty(shape, dtype=torch.float32), size


def _quantized(
    x: Tensor, residual: Tensor | None, **norm: Unpack[QuantizedNorm]
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales and the sum, which is x without a residual."""
    scheme, weight, eps = norm["scheme"], norm["weight"], norm["eps"]
    flat, total = dense_rows(x), x
    by_column = norm["column_major"] and scheme == "fp8_group"
    codes, scales, size = empty_outputs(flat, scheme, norm["dtype"], norm["group"], by_column)
    outputs = (e2m1_view(codes), e8m0_view(scales)) if scheme == "mxfp4" else (codes, scales)
    if by_column:
        scales = scales.t()
    gemma = norm["style"] == "one_plus"
    how = {"group_size": size, "shuffle_scale": by_column, "gemma_norm": gemma}
    if residual is not None:
        other, total = dense_rows(residual), torch.empty_like(flat)
        if x.numel():
            add_rmsnorm_quant(outputs[0], flat, other, total, outputs[1], weight, eps, **how)
    elif x.numel():
        rmsnorm_quant(outputs[0], flat, outputs[1], weight, eps, **how)
    return with_lead(codes, x), with_lead(scales, x), total.view(x.shape)


@ops.rms_norm_quant.kernel("aiter", refuses=_refuse, rounds="once")
def rms_norm_quant(x: Tensor, **norm: Unpack[QuantizedNorm]) -> tuple[Tensor, Tensor, Tensor]:
    codes, scales, _ = _quantized(x, None, **norm)
    return codes, scales, x.new_empty(0)


@ops.add_rms_norm_quant.kernel("aiter", refuses=_refuse, rounds="once")
def add_rms_norm_quant(
    x: Tensor, residual: Tensor, **norm: Unpack[QuantizedNorm]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return *_quantized(x, residual, **norm), x.new_empty(0)
