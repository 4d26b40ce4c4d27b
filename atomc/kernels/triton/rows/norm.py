"""Norms in Triton: a row is read once, stays in registers, and is rounded where the reference
rounds. A program takes one wide row or several narrow ones.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from atomc import ops
from atomc.kernels.checks import first_refusal, too_wide, unknown, unlike, unlike_shapes
from atomc.kernels.triton.launch.launch import (
    begin,
    inner_sizes,
    load_rows,
    num_rows,
    overlap,
    row_offset,
    row_tile,
    rows_of,
    store_rows,
    unfit,
)
from atomc.kernels.triton.launch.tiles import NORM
from atomc.ops.formats import FLOATS
from atomc.ops.norm import RMS_NORM_STYLES
from atomc.ops.op import Refusal
from atomc.platform import Platform

MAX_COLUMNS = 65536


@triton.jit
def row_sum(x, residual, total, row, column, sizes, inside):
    """x, or x + residual rounded to their dtype, and stored unless total is None, in fp32."""
    if residual is not None:
        # Offsets come before loads, which then are under way at the same time.
        x_at = row_offset(x, row, sizes) + column
        residual_at = row_offset(residual, row, sizes) + column
        if total is not None:
            total_at = row_offset(total, row, sizes) + column
        y = tl.load(x.ptr + x_at, inside, 0.0).to(tl.float32)
        y += tl.load(residual.ptr + residual_at, inside, 0.0).to(tl.float32)
        rounded = y.to(x.ptr.dtype.element_ty)
        if total is not None:
            tl.store(total.ptr + total_at, rounded, inside)
        y = rounded.to(tl.float32)
    else:
        y = load_rows(x, row, column, sizes, inside)
    return y


@triton.jit
def weighted(y, weight, DTYPE: constexpr, STYLE: constexpr):
    """The normalized y times the weight, both fp32, rounded as the style requires; DTYPE is the
    dtype of the norm's input.
    """
    if STYLE == "after":
        return weight * y.to(DTYPE).to(tl.float32)
    elif STYLE == "one_plus":
        return y * (1.0 + weight)
    else:
        return weight * y


@triton.jit
def normed(x, weight, eps, D: constexpr, DTYPE: constexpr, STYLE: constexpr):
    """The RMSNorm of rows of D columns, padded by zeros. x [ROWS, BLOCK], weight [1, BLOCK]."""
    return weighted(x * tl.rsqrt(tl.sum(x * x, 1)[:, None] / D + eps), weight, DTYPE, STYLE)


@triton.jit(do_not_specialize=["rows"])
def _rms_norm(
    x,
    residual,
    out,
    total,
    weight_ptr,
    rows,
    sizes,
    eps,
    D: constexpr,
    WIDTH: constexpr,
    BLOCK: constexpr,
    ROWS: constexpr,
    STYLE: constexpr,
    PDL: constexpr,
):
    row, column, inside = row_tile(rows, D, 0, ROWS, BLOCK)
    begin(PDL)
    weight = tl.load(weight_ptr + column, column < D, 0.0).to(tl.float32)
    y = row_sum(x, residual, total, row, column, sizes, inside)
    y = normed(y, weight, eps, D, x.ptr.dtype.element_ty, STYLE)
    if WIDTH > D:
        y = tl.where(column < D, y, 0.0)
    store_rows(out, row, column, sizes, y, (row < rows) & (column < WIDTH))


@triton.jit(do_not_specialize=["rows"])
def _layer_norm(
    x,
    residual,
    out,
    total,
    weight_ptr,
    bias_ptr,
    rows,
    sizes,
    eps,
    D: constexpr,
    BLOCK: constexpr,
    ROWS: constexpr,
    PDL: constexpr,
):
    row, column, inside = row_tile(rows, D, 0, ROWS, BLOCK)
    begin(PDL)
    x = row_sum(x, residual, total, row, column, sizes, inside)
    centred = tl.where(column < D, x - tl.sum(x, 1)[:, None] / D, 0.0)
    y = centred * tl.rsqrt(tl.sum(centred * centred, 1)[:, None] / D + eps)
    if weight_ptr is not None:
        y *= tl.load(weight_ptr + column, column < D, 0.0).to(tl.float32)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + column, column < D, 0.0).to(tl.float32)
    store_rows(out, row, column, sizes, y, inside)


def tile_for(x: Tensor, columns: int) -> dict[str, int]:
    """The launch arguments for the rows of x, with this number of columns in the result."""
    block = triton.next_power_of_2(columns)
    return NORM.choose(x.device, num_rows(x), block).launch(block)


def refuse_layer_norm(
    platform: Platform,
    x: Tensor,
    residual: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
) -> Refusal | None:
    return (
        unfit(platform, x=x, residual=residual, weight=weight, bias=bias)
        or too_wide(x.shape[-1], MAX_COLUMNS)
        or unlike(FLOATS, x=x, residual=residual)
        or unlike_shapes(x, residual=residual)
    )


def refuse_rms_norm(
    platform: Platform, x: Tensor, weight: Tensor, style: str, residual: Tensor | None = None
) -> Refusal | None:
    return unknown(RMS_NORM_STYLES, style=style) or refuse_layer_norm(platform, x, residual, weight)


def _launch(
    kernel: triton.JITFunction,
    x: Tensor,
    residual: Tensor | None,
    weights: tuple[Tensor | None, ...],
    out: Tensor,
    eps: float,
    keep_sum: bool,
    **constants: int | str,
) -> Tensor:
    """Writes the norm of x, or of x + residual, to out. Returns that sum if it is kept, or x."""
    total = torch.empty_like(x) if keep_sum else None
    if rows := num_rows(out):
        cut = tile_for(x, out.shape[-1])
        kernel[(triton.cdiv(rows, cut["ROWS"]),)](
            *map(rows_of, (x, residual, out, total)),
            *weights,
            rows,
            inner_sizes(x),
            eps,
            D=x.shape[-1],
            **constants,
            **cut,
            **overlap(x.device),
        )
    return x if total is None else total


def normed_dtype(x: Tensor, weight: Tensor, style: str) -> torch.dtype:
    return torch.promote_types(x.dtype, weight.dtype) if style == "after" else x.dtype


@ops.rms_norm.kernel("triton", refuses=refuse_rms_norm, tuned_for=NORM.archs)
def rms_norm(x: Tensor, weight: Tensor, eps: float, style: str) -> Tensor:
    out = torch.empty_like(x, dtype=normed_dtype(x, weight, style))
    _launch(_rms_norm, x, None, (weight,), out, eps, False, WIDTH=x.shape[-1], STYLE=style)
    return out


@ops.add_rms_norm.kernel("triton", refuses=refuse_rms_norm, tuned_for=NORM.archs)
def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, style: str, keep_sum: bool
) -> tuple[Tensor, Tensor]:
    out = torch.empty_like(x, dtype=normed_dtype(x, weight, style))
    total = _launch(
        _rms_norm, x, residual, (weight,), out, eps, keep_sum, WIDTH=x.shape[-1], STYLE=style
    )
    return out, total if keep_sum else x.new_empty(0)


def refuse_padding(x: Tensor, columns: int) -> Refusal | None:
    if x.shape[-1] + columns > MAX_COLUMNS:
        return Refusal(
            "shape",
            f"rows of {x.shape[-1]} + {columns} exceed the limit of {MAX_COLUMNS}",
        )
    return None


refuse_add_rms_norm_pad = first_refusal(refuse_padding, refuse_rms_norm)


@ops.add_rms_norm_pad.kernel("triton", refuses=refuse_add_rms_norm_pad, tuned_for=NORM.archs)
def add_rms_norm_pad(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, columns: int, style: str
) -> tuple[Tensor, Tensor]:
    width = x.shape[-1] + columns
    out = x.new_empty((*x.shape[:-1], width), dtype=normed_dtype(x, weight, style))
    return out, _launch(_rms_norm, x, residual, (weight,), out, eps, True, WIDTH=width, STYLE=style)


@ops.layer_norm.kernel("triton", refuses=refuse_layer_norm, tuned_for=NORM.archs)
def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    _launch(_layer_norm, x, None, (weight, bias), out, eps, False)
    return out


@ops.add_layer_norm.kernel("triton", refuses=refuse_layer_norm, tuned_for=NORM.archs)
def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    keep_sum: bool,
) -> tuple[Tensor, Tensor]:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    total = _launch(_layer_norm, x, residual, (weight, bias), out, eps, keep_sum)
    return out, total if keep_sum else x.new_empty(0)
