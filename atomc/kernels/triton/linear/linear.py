"""Linear layers of few rows in Triton, which are bound by the bandwidth of reading the weight.

A program takes some rows of the weight and sums over all of K, in parts that it adds in a fixed
order at the end. M rows of x, N rows of the weight, K columns.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from atomc import ops
from atomc.graph.sizes import known_equal
from atomc.kernels.checks import unlike
from atomc.kernels.triton.launch.launch import (
    let_next_start,
    more_rows,
    not_nvidia,
    num_rows,
    overlap,
    row_layout,
    row_offset,
    unfit,
    wait_for_last,
)
from atomc.kernels.triton.launch.tile_table import Tile
from atomc.kernels.triton.launch.tiles import LINEAR
from atomc.ops.formats import HALVES
from atomc.ops.op import Refusal
from atomc.platform import Platform

MAX_ROWS = 16


@triton.jit(do_not_specialize=["M"])
def _multiplied_rows(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    M,
    d1,
    d2,
    x0,
    x1,
    x2,
    N,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EARLY: tl.constexpr,
    PDL: tl.constexpr,
):
    first = tl.program_id(0) * BLOCK_N
    # Three dimensions from the start: with a later expansion, one of the operands would be
    # converted to another layout in each step.
    m = (tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M))[:, None, None]
    n = (first + tl.arange(0, BLOCK_N))[None, :, None]
    k = tl.arange(0, BLOCK_K)[None, None, :]
    x_at = x_ptr + row_offset(m, d1, d2, x0, x1, x2) + k
    weight_at = weight_ptr + n.to(tl.int64) * K + k
    if EARLY:
        let_next_start(PDL)
    wait_for_last(PDL)
    sums = tl.zeros((BLOCK_M, BLOCK_N, BLOCK_K), tl.float32)
    for start in tl.static_range(0, K, BLOCK_K):
        weight = tl.load(weight_at + start, (n < N) & (k < K - start), 0.0, cache_modifier=".cg")
        x = tl.load(x_at + start, (m < M) & (k < K - start), 0.0)
        sums += x.to(tl.float32) * weight.to(tl.float32)
    if not EARLY:
        let_next_start(PDL)
    out = tl.sum(sums, 2)[:, :, None]
    if bias_ptr is not None:
        out += tl.load(bias_ptr + n, n < N, 0.0).to(tl.float32)
    tl.store(out_ptr + m.to(tl.int64) * N + n, out.to(out_ptr.dtype.element_ty), (m < M) & (n < N))


@triton.jit(do_not_specialize=["M"])
def _tensor_core_product(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    M,
    d1,
    d2,
    x0,
    x1,
    x2,
    N,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    first = tl.program_id(0) * BLOCK_N
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = first + tl.arange(0, BLOCK_N)
    # K is split into PARTS, each computed by its own warps.
    LENGTH: tl.constexpr = (K + PARTS * BLOCK_K - 1) // (PARTS * BLOCK_K) * BLOCK_K
    k = tl.arange(0, PARTS)[:, None, None] * LENGTH + tl.arange(0, BLOCK_K)[None, None, :]
    x_at = x_ptr + row_offset(m, d1, d2, x0, x1, x2)[None, :, None] + k
    weight_at = weight_ptr + n.to(tl.int64)[None, :, None] * K + k
    wait_for_last(PDL)
    if BLOCK_M < 16:
        sums = tl.zeros((PARTS, BLOCK_N, BLOCK_M), tl.float32)
    else:
        sums = tl.zeros((PARTS, BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, LENGTH, BLOCK_K):
        weight = tl.load(
            weight_at + start, (n < N)[None, :, None] & (k < K - start), 0.0, cache_modifier=".cg"
        )
        x = tl.load(x_at + start, (m < M)[None, :, None] & (k < K - start), 0.0)
        # The MMA instruction is 16 rows by 8 columns.
        if BLOCK_M < 16:
            sums = tl.dot(weight, tl.permute(x, (0, 2, 1)), sums)
        else:
            sums = tl.dot(x, tl.permute(weight, (0, 2, 1)), sums)
    let_next_start(PDL)
    out = tl.sum(sums, 0)
    if BLOCK_M < 16:
        out = tl.trans(out)
    if bias_ptr is not None:
        out += tl.load(bias_ptr + n, n < N, 0.0).to(tl.float32)[None, :]
    tl.store(
        out_ptr + m.to(tl.int64)[:, None] * N + n[None, :],
        out.to(out_ptr.dtype.element_ty),
        (m < M)[:, None] & (n < N)[None, :],
    )


def multiply(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tile: Tile | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """x @ weight.T + bias in out_dtype (None: that of x). tile: None for that of the table."""
    n, k = weight.shape
    out = x.new_empty((*x.shape[:-1], n), dtype=out_dtype)
    if rows := num_rows(x):
        tile = tile or LINEAR.choose(x.device, rows, n, k)
        # H200, us of a layer without attention, with the next kernel released before / after the
        # loop. One row: Qwen3-0.6B 17.6 / 17.1, 8B 96 / 104. Two rows: 0.6B 23.6 / 19.9. Tensor
        # cores, 8 rows: 0.6B 26.8 / 22.2, 8B 110 / 107. With the weight prefetched into the L2
        # cache before the wait, 8B took 109 with one row and 128 with eight.
        early = {"EARLY": rows == 1 and k >= 4096}
        kernel, more = (
            (_tensor_core_product, {"PARTS": tile.parts})
            if tile.parts
            else (_multiplied_rows, early)
        )
        kernel[(triton.cdiv(n, tile.weight_rows), triton.cdiv(rows, tile.rows))](
            x,
            weight,
            bias,
            out,
            rows,
            *row_layout(x),
            n,
            K=k,
            BLOCK_M=tile.rows,
            BLOCK_N=tile.weight_rows,
            BLOCK_K=tile.columns,
            num_warps=tile.warps,
            num_stages=tile.stages,
            **more,
            **overlap(x.device),
        )
    return out


def refuse_linear(
    platform: Platform, x: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Refusal | None:
    if reason := (
        unfit(platform, x=x, weight=weight, bias=bias)
        or not_nvidia(platform)
        or unlike(HALVES, x=x, weight=weight, bias=bias)
    ):
        return reason
    n, k = weight.shape
    if not isinstance(n, int):
        return Refusal("shape", "the weight has no fixed number of rows")
    if k % 8 or not known_equal(weight.stride(0), k):
        return Refusal(
            "layout", "the weight is not contiguous, or its rows are not a multiple of 16 bytes"
        )
    return more_rows(x, MAX_ROWS, "for which cuBLAS is as fast")


@ops.linear.kernel(
    "triton", tokens=ops.Tokens(1, MAX_ROWS), refuses=refuse_linear, tuned_for=LINEAR.archs
)
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return multiply(x, weight, bias)


@ops.linear_fp32.kernel(
    "triton", tokens=ops.Tokens(1, MAX_ROWS), refuses=refuse_linear, tuned_for=LINEAR.archs
)
def linear_fp32(x: Tensor, weight: Tensor) -> Tensor:
    return multiply(x, weight, None, out_dtype=torch.float32)
