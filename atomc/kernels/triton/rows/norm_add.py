"""RMSNorm, add, and RMSNorm of the sum, in one Triton kernel: the rows stay in registers, and are
rounded where the reference rounds.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from atomc import ops
from atomc.kernels.checks import too_wide, unknown
from atomc.kernels.triton.launch.launch import (
    at,
    begin,
    inner_sizes,
    load_rows,
    num_rows,
    overlap,
    row_tile,
    rows_of,
    store_rows,
    unfit,
)
from atomc.kernels.triton.launch.tiles import NORM
from atomc.kernels.triton.rows.norm import normed, normed_dtype, refuse_rms_norm, tile_for
from atomc.ops.norm import RMS_NORM_STYLES
from atomc.ops.op import Refusal
from atomc.platform import Platform

# A row, its residual and two weights are in the registers of a program.
MAX_COLUMNS = 16384


@triton.jit(do_not_specialize=["rows"])
def _rms_norm_add(
    x,
    residual,
    total,
    out,
    weight_ptr,
    out_weight_ptr,
    rows,
    sizes,
    eps,
    out_eps,
    D: constexpr,
    BLOCK: constexpr,
    ROWS: constexpr,
    STYLE: constexpr,
    OUT_STYLE: constexpr,
    PDL: constexpr,
):
    DTYPE: constexpr = x.ptr.dtype.element_ty
    row, column, inside = row_tile(rows, D, 0, ROWS, BLOCK)
    begin(PDL)
    # All loads come before the first sum, so that they are under way at the same time.
    weight = tl.load(weight_ptr + column, column < D, 0.0).to(tl.float32)
    addend = tl.load(at(residual, row, sizes) + column, inside, 0.0)
    if out is not None:
        out_weight = tl.load(out_weight_ptr + column, column < D, 0.0)
    y = load_rows(x, row, column, sizes, inside)
    y = normed(y, weight, eps, D, DTYPE, STYLE).to(DTYPE).to(tl.float32)
    y = (y + addend.to(tl.float32)).to(DTYPE).to(tl.float32)
    if total is not None:
        store_rows(total, row, column, sizes, y, inside)
    if out is not None:
        y = normed(y, out_weight.to(tl.float32), out_eps, D, DTYPE, OUT_STYLE)
        store_rows(out, row, column, sizes, y, inside)


def _launch(
    x: Tensor,
    residual: Tensor,
    total: Tensor | None,
    out: Tensor | None,
    weights: tuple[Tensor, Tensor | None],
    eps: tuple[float, float],
    styles: tuple[str, str],
) -> None:
    """weights, eps, styles: of the norm of x, and of that of the sum, which is not computed without
    `out`.
    """
    if rows := num_rows(x):
        cut = tile_for(x, x.shape[-1])
        _rms_norm_add[(triton.cdiv(rows, cut["ROWS"]),)](
            *map(rows_of, (x, residual, total, out)),
            *weights,
            rows,
            inner_sizes(x),
            *eps,
            D=x.shape[-1],
            STYLE=styles[0],
            OUT_STYLE=styles[1],
            **cut,
            **overlap(x.device),
        )


def refuse_rms_norm_add(
    platform: Platform, x: Tensor, residual: Tensor, weight: Tensor, style: str
) -> Refusal | None:
    if reason := refuse_rms_norm(platform, x, weight, style, residual):
        return reason
    if (dtype := normed_dtype(x, weight, style)) != x.dtype:
        return Refusal("dtype", f"the norm is {dtype}, and it adds {x.dtype}")
    return too_wide(x.shape[-1], MAX_COLUMNS)


@ops.rms_norm_add.kernel("triton", refuses=refuse_rms_norm_add, tuned_for=NORM.archs)
def rms_norm_add(x: Tensor, residual: Tensor, weight: Tensor, eps: float, style: str) -> Tensor:
    total = torch.empty_like(x)
    _launch(x, residual, total, None, (weight, None), (eps, eps), (style, style))
    return total


def refuse_rms_norm_add_rms_norm(
    platform: Platform,
    x: Tensor,
    residual: Tensor,
    x_weight: Tensor,
    sum_weight: Tensor,
    x_style: str,
    sum_style: str,
) -> Refusal | None:
    return (
        refuse_rms_norm_add(platform, x, residual, x_weight, x_style)
        or unknown(RMS_NORM_STYLES, sum_style=sum_style)
        or unfit(platform, sum_weight=sum_weight)
    )


@ops.rms_norm_add_rms_norm.kernel(
    "triton", refuses=refuse_rms_norm_add_rms_norm, tuned_for=NORM.archs
)
def rms_norm_add_rms_norm(
    x: Tensor,
    residual: Tensor,
    x_weight: Tensor,
    sum_weight: Tensor,
    x_eps: float,
    sum_eps: float,
    x_style: str,
    sum_style: str,
    keep_sum: bool,
) -> tuple[Tensor, Tensor]:
    total = torch.empty_like(x) if keep_sum else None
    out = torch.empty_like(x, dtype=normed_dtype(x, sum_weight, sum_style))
    weights, styles = (x_weight, sum_weight), (x_style, sum_style)
    _launch(x, residual, total, out, weights, (x_eps, sum_eps), styles)
    return out, x.new_empty(0) if total is None else total
