"""The results of attention of which several programs computed a part of the keys each.

R any number of rows and heads, D width of values.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from atomc.kernels.triton.launch.launch import begin, dot_size, overlap

# Columns of a program, of few and of more rows, and the numbers of a warp. H200, us with 64 / 128 /
# 512 columns by one warp: 16 rows of 512 in 32 splits 1.5 / 1.6 / 17.5, 128 in 16 splits 2.0 / 2.3
# / 4.5, 256 of 128 in 8 splits 1.4 / 1.4 / -, 1,024 of 512 in 4 splits 10.6 / 5.6 / 3.6 and in two
# 10.6 / 5.7 / 1.8. With 64 by four warps 1.6, 3.5, 2.4, 10.5 and 10.6.
COLUMNS, FEW_ROWS, COLUMNS_OF_MORE = 64, 256, 512
A_WARP = 2048


@triton.jit
def add_weighted(acc, total, peak, scores, values, unit, UNSEEN: constexpr):
    """The running softmax (weighted values, sum of weights, maximum in base 2) with the values of
    these scores times `unit`. UNSEEN: some rows may not have seen a key.
    """
    highest = tl.maximum(peak, tl.max(scores, 1) * unit)
    shift = highest
    if UNSEEN:
        # For a row that has not seen a key, -inf - -inf would be NaN.
        shift = tl.where(highest == -float("inf"), 0.0, highest)
    weights = tl.exp2(scores * unit - shift[:, None])
    decay = tl.exp2(peak - shift)
    total = total * decay + tl.sum(weights, 1)
    acc = tl.dot(weights.to(values.dtype), values, acc * decay[:, None], input_precision="ieee")
    return acc, total, highest


@triton.jit
def store_attended(out_ptr, lse_ptr, acc, total, peak, row, dv, valid, some, DV: constexpr):
    """Store the results of a tile in these rows [M] and columns [1, D], and the logarithms in base
    2 of their softmax masses where there is memory for these; no results if `some` is false: the
    split has no keys.
    """
    if lse_ptr is not None:
        lse = tl.where(some, peak + tl.log2(total), -float("inf"))
        tl.store(lse_ptr + row, lse, mask=valid)
        valid = valid & some
    out_at = out_ptr + row[:, None] * DV + dv
    tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=valid[:, None] & (dv < DV))


@triton.jit(do_not_specialize=["num_splits"])
def _combine_splits(
    partial_ptr,
    lse_ptr,
    out_ptr,
    num_splits,
    DV: constexpr,
    BLOCK_DV: constexpr,
    BLOCK_SPLITS: constexpr,
    PDL: constexpr,
):
    """Some columns of one head of one row: the sum of the splits' results, weighted by the softmax
    mass of their keys.
    """
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, BLOCK_SPLITS)
    dv = tl.program_id(1) * BLOCK_DV + tl.arange(0, BLOCK_DV)
    at = row * num_splits + split
    lse = tl.load(lse_ptr + at, mask=split < num_splits, other=-float("inf"))
    there = (split < num_splits)[:, None] & (dv < DV)[None, :]
    partial = tl.load(partial_ptr + at[:, None] * DV + dv[None, :], mask=there, other=0.0)
    peak = tl.max(lse, 0)
    weights = tl.exp2(lse - tl.where(peak == -float("inf"), 0.0, peak))
    total = tl.sum(weights, 0)
    # A split without keys wrote no values; its memory is uninitialized.
    partial = tl.where((lse == -float("inf"))[:, None], 0.0, partial)
    out = tl.sum(weights[:, None] * partial, 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(out_ptr + row * DV + dv, out.to(out_ptr.dtype.element_ty), mask=dv < DV)


def empty_splits(q: Tensor, width: int, splits: int) -> tuple[Tensor, Tensor | None]:
    """Where a kernel writes for q [..., any]: for one split, the result [..., D]; for more, their
    results [..., splits, D] in fp32, and the logarithms in base 2 of their softmax masses
    [..., splits], -inf for a split without keys, whose result is not read.
    """
    rows = q.shape[:-1]
    if splits == 1:
        return q.new_empty((*rows, width)), None
    lse = q.new_empty((*rows, splits), dtype=torch.float32)
    return lse.new_empty((*lse.shape, width)), lse


def combined(parts: Tensor, lse: Tensor, dtype: torch.dtype) -> Tensor:
    """The result [..., D] of the splits of empty_splits."""
    *rows, splits, width = parts.shape
    out = parts.new_empty((*rows, width), dtype=dtype)
    num_rows, block_splits = lse.numel() // splits, triton.next_power_of_2(splits)
    most = COLUMNS if num_rows <= FEW_ROWS else COLUMNS_OF_MORE
    columns = min(dot_size(width), most)
    _combine_splits[(num_rows, triton.cdiv(width, columns))](
        parts,
        lse,
        out,
        splits,
        DV=width,
        BLOCK_DV=columns,
        BLOCK_SPLITS=block_splits,
        num_warps=min(max(1, columns * block_splits // A_WARP), 8),
        **overlap(parts.device),
    )
    return out
