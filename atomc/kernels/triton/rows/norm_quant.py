"""RMSNorm with a quantized result, in Triton: a row is read once and stays in registers.

The order in which squares are added can move a value across the border between two codes; tests
allow this for few codes, by one step.
"""

from typing import NamedTuple, Unpack

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from atomc import ops
from atomc.kernels.checks import first_refusal
from atomc.kernels.triton.launch.launch import (
    at,
    begin,
    inner_sizes,
    num_rows,
    overlap,
    register_limit,
    row_tile,
    rows_of,
)
from atomc.kernels.triton.launch.tiles import NORM
from atomc.kernels.triton.rows.norm import normed, normed_dtype, refuse_rms_norm, row_sum, tile_for
from atomc.kernels.triton.rows.quant import Coding, Quantized, store_quantized, unquantizable
from atomc.ops.norm_quant import QuantizedNorm
from atomc.ops.schemes import SchemeArguments


class Constants(NamedTuple):
    """Of a norm in a kernel."""

    columns: int
    block: int
    coding: Coding


@triton.jit
def quantize_norm(
    x,
    residual,
    total,
    weight_ptr,
    kept,
    out,
    rows,
    sizes,
    eps,
    NORM: constexpr,
    ROWS: constexpr,
    STYLE: constexpr,
):
    """Store the sum, the norm if it is kept, and its codes and scales, if there are."""
    DTYPE: constexpr = x.ptr.dtype.element_ty
    # Of two dtypes fp32 is the common one.
    SAME: constexpr = STYLE != "after" or weight_ptr.dtype.element_ty == DTYPE
    D: constexpr = NORM.columns
    CODING: constexpr = NORM.coding
    row, column, inside = row_tile(rows, D, 0, ROWS, NORM.block)
    weight = tl.load(weight_ptr + column, column < D, 0.0).to(tl.float32)
    y = row_sum(x, residual, total, row, column, sizes, inside)
    y = normed(y, weight, eps, D, DTYPE, STYLE).to(DTYPE if SAME else tl.float32)
    if kept is not None:
        tl.store(at(kept, row, sizes) + column, y, inside)
    if CODING.scheme != "":
        store_quantized(y, out, row, 0, rows, D, CODING)


@triton.jit(do_not_specialize=["rows"])
def _norm_quant(
    x,
    rows,
    sizes,
    eps,
    NORM: constexpr,
    ROWS: constexpr,
    STYLE: constexpr,
    PDL: constexpr,
):
    begin(PDL)
    quantize_norm(*x, rows, sizes, eps, NORM, ROWS, STYLE)


class RowNorm:
    """A norm of x, or of x + residual, and its results.

    out        None: only the norm is stored
    norm       the norm; [0] unless `keep`
    operands   the first ones of `quantize_norm`
    """

    def __init__(
        self,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor,
        style: str,
        out: Quantized | None,
        keep: bool,
    ):
        width, dtype = x.shape[-1], normed_dtype(x, weight, style)
        self.total = None if residual is None else torch.empty_like(x)
        self.norm = torch.empty_like(x, dtype=dtype) if keep else x.new_empty(0, dtype=dtype)
        coding = Coding() if out is None else out.coding
        block = max(triton.next_power_of_2(width), coding.group)
        self.constants = Constants(width, block, coding)
        rows = (
            *map(rows_of, (x, residual, self.total)),
            weight,
            rows_of(self.norm if keep else None),
        )
        self.operands = *rows, None if out is None else out.into


def quantized_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    scale: Tensor | None,
    style: str,
    keep: bool = False,
    **scheme: Unpack[SchemeArguments],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """add_rms_norm_quant; without a residual, the sum is x."""
    out = Quantized(x, scale, **scheme)
    norm = RowNorm(x, residual, weight, style, out, keep)
    if rows := num_rows(x):
        tile = tile_for(x, x.shape[-1])
        _norm_quant[(triton.cdiv(rows, tile["ROWS"]),)](
            norm.operands,
            rows,
            inner_sizes(x),
            eps,
            NORM=norm.constants,
            ROWS=tile["ROWS"],
            STYLE=style,
            num_warps=tile["num_warps"],
            **overlap(x.device),
            **register_limit(x.device),
        )
    return out.codes, out.scales, x if norm.total is None else norm.total, norm.norm


refuse_rms_norm_quant = first_refusal(unquantizable, refuse_rms_norm)


@ops.rms_norm_quant.kernel("triton", refuses=refuse_rms_norm_quant, tuned_for=NORM.archs)
def rms_norm_quant(x: Tensor, **norm: Unpack[QuantizedNorm]) -> tuple[Tensor, Tensor, Tensor]:
    codes, scales, _, y = quantized_norm(x, None, **norm)
    return codes, scales, y


@ops.add_rms_norm_quant.kernel("triton", refuses=refuse_rms_norm_quant, tuned_for=NORM.archs)
def add_rms_norm_quant(
    x: Tensor, residual: Tensor, **norm: Unpack[QuantizedNorm]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return quantized_norm(x, residual, **norm)
