"""Linear layers of few rows in Triton, which are bound by the bandwidth of reading the weight.

A program takes some rows of the weight and sums over all of K, in parts that it adds in a fixed
order at the end. M rows of x, N rows of the weight, K columns. With a GATE a program has rows of
gate and of up in turn, and stores what the gate makes of them.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from atomc import ops
from atomc.graph.sizes import known_equal
from atomc.kernels.checks import unlike
from atomc.kernels.triton.launch.launch import (
    at,
    inner_sizes,
    let_next_start,
    more_rows,
    not_nvidia,
    num_rows,
    overlap,
    rows_of,
    unfit,
    wait_for_last,
)
from atomc.kernels.triton.launch.tile_table import Tile
from atomc.kernels.triton.launch.tiles import LINEAR, LINEAR_GATED
from atomc.kernels.triton.rows.gate import GateConstants, activated
from atomc.ops.formats import HALVES
from atomc.ops.op import Refusal
from atomc.platform import Platform

MAX_ROWS = 16


class Scales(NamedTuple):
    """Scales of x and of the weight as one argument of a kernel, with the strides of rows (or of
    rows of blocks) and of groups.
    """

    x: Tensor
    weight: Tensor
    x_row: int
    x_group: int
    weight_row: int


@triton.jit
def _weight_rows(N, BLOCK_N: constexpr, GATE: constexpr):
    """The rows of the weight that this program multiplies."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    return n if GATE is None else n % 2 * (N // 2) + n // 2


@triton.jit
def _store_gated(sums, bias_ptr, out_ptr, m, n, M, N, GATE: constexpr):
    """Store the gate of sums of rows m of x and n of the weight, plus the bias."""
    DTYPE: constexpr = out_ptr.dtype.element_ty
    ROWS: constexpr = sums.shape[0]
    COLUMNS: constexpr = sums.shape[1] // 2
    if bias_ptr is not None:
        sums += tl.load(bias_ptr + n, n < N, 0.0).to(tl.float32)[None, :]
    gate, up = tl.split(tl.reshape(sums.to(DTYPE), (ROWS, COLUMNS, 2)))
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    out_at = out_ptr + m[:, None].to(tl.int64) * (N // 2) + column
    tl.store(out_at, activated(gate, up, GATE, DTYPE), (m[:, None] < M) & (column < N // 2))


@triton.jit
def store_product(sums, scales, bias_ptr, out_ptr, m, n, M, N, inside, BLOCKS: constexpr = False):
    """Store the sums, times the scales of rows unless BLOCKS, plus the bias, in rows m and columns
    n, which broadcast to the shape of the sums.
    """
    out = sums.to(tl.float32)
    if scales is not None and not BLOCKS:
        of_weight = tl.load(scales.weight + n * scales.weight_row, n < N, 0.0)
        out *= tl.load(scales.x + m * scales.x_row, m < M, 0.0) * of_weight
    if bias_ptr is not None:
        out += tl.load(bias_ptr + n, n < N, 0.0).to(tl.float32)
    tl.store(out_ptr + m.to(tl.int64) * N + n, out.to(out_ptr.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["M"])
def _multiplied_rows(
    x,
    weight_ptr,
    bias_ptr,
    out_ptr,
    M,
    sizes,
    N,
    K: constexpr,
    BLOCK_M: constexpr,
    BLOCK_N: constexpr,
    BLOCK_K: constexpr,
    EARLY: constexpr,
    GATE: constexpr,
    PDL: constexpr,
):
    # Three dimensions from the start: with a later expansion, one of the operands would be
    # converted to another layout in each step.
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    weight_rows = _weight_rows(N, BLOCK_N, GATE)
    m, n = rows[:, None, None], weight_rows[None, :, None]
    k = tl.arange(0, BLOCK_K)[None, None, :]
    x_at = at(x, m, sizes) + k
    weight_at = weight_ptr + n.to(tl.int64) * K + k
    if EARLY:
        let_next_start(PDL)
    wait_for_last(PDL)
    sums = tl.zeros((BLOCK_M, BLOCK_N, BLOCK_K), tl.float32)
    for start in tl.static_range(0, K, BLOCK_K):
        weight = tl.load(weight_at + start, (n < N) & (k < K - start), 0.0, cache_modifier=".cg")
        values = tl.load(x_at + start, (m < M) & (k < K - start), 0.0)
        sums += values.to(tl.float32) * weight.to(tl.float32)
    if not EARLY:
        let_next_start(PDL)
    if GATE is not None:
        _store_gated(tl.sum(sums, 2), bias_ptr, out_ptr, rows, weight_rows, M, N, GATE)
    else:
        out = tl.sum(sums, 2)[:, :, None]
        store_product(out, None, bias_ptr, out_ptr, m, n, M, N, (m < M) & (n < N))


@triton.jit
def multiply_parts(
    x_at,
    weight_ptr,
    scales,
    bias_ptr,
    out_ptr,
    m,
    M,
    N,
    K: constexpr,
    BLOCKS: constexpr,
    WHOLE: constexpr,
    BLOCK_M: constexpr,
    BLOCK_N: constexpr,
    BLOCK_K: constexpr,
    PARTS: constexpr,
    PDL: constexpr,
    GATE: constexpr = None,
):
    """Rows m of x, which are at x_at, times some rows of the weight, by tensor cores. K is split
    into PARTS, each computed by its own warps. BLOCKS: sums of 128 columns have scales; WHOLE:
    operands are int8.
    """
    first = tl.program_id(0) * BLOCK_N
    n = _weight_rows(N, BLOCK_N, GATE)
    LENGTH: constexpr = (K + PARTS * BLOCK_K - 1) // (PARTS * BLOCK_K) * BLOCK_K
    part = tl.arange(0, PARTS)
    k = part[:, None, None] * LENGTH + tl.arange(0, BLOCK_K)[None, None, :]
    x_at = x_at[None, :, None] + k
    weight_at = weight_ptr + n.to(tl.int64)[None, :, None] * K + k
    WIDE: constexpr = tl.int32 if WHOLE else tl.float32
    # The MMA instruction is 16 rows by 8 columns.
    SWAP: constexpr = BLOCK_M < 16
    wait_for_last(PDL)
    sums = tl.zeros((PARTS, BLOCK_N if SWAP else BLOCK_M, BLOCK_M if SWAP else BLOCK_N), WIDE)
    for start in range(0, LENGTH, BLOCK_K):
        weight = tl.load(
            weight_at + start, (n < N)[None, :, None] & (k < K - start), 0.0, cache_modifier=".cg"
        )
        x = tl.load(x_at + start, (m < M)[None, :, None] & (k < K - start), 0.0)
        if BLOCKS:
            group = part * (LENGTH // 128) + start // 128
            there = group * 128 < K
            weight_scale_at = scales.weight + (first // 128) * scales.weight_row + group
            x_scale_at = scales.x + m[None, :] * scales.x_row + group[:, None] * scales.x_group
            factor = tl.load(x_scale_at, (m < M)[None, :] & there[:, None], 0.0)
            factor *= tl.load(weight_scale_at, there, 0.0)[:, None]
            if SWAP:
                product = tl.dot(weight, tl.permute(x, (0, 2, 1)), out_dtype=WIDE)
                sums += product * factor[:, None, :]
            else:
                product = tl.dot(x, tl.permute(weight, (0, 2, 1)), out_dtype=WIDE)
                sums += product * factor[:, :, None]
        elif SWAP:
            sums = tl.dot(weight, tl.permute(x, (0, 2, 1)), sums, out_dtype=WIDE)
        else:
            sums = tl.dot(x, tl.permute(weight, (0, 2, 1)), sums, out_dtype=WIDE)
    let_next_start(PDL)
    out = tl.sum(sums, 0)
    if SWAP:
        out = tl.trans(out)
    if GATE is not None:
        _store_gated(out, bias_ptr, out_ptr, m, n, M, N, GATE)
    else:
        m, n = m[:, None], n[None, :]
        store_product(out, scales, bias_ptr, out_ptr, m, n, M, N, (m < M) & (n < N), BLOCKS)


@triton.jit(do_not_specialize=["M"])
def _tensor_core_product(
    x,
    weight_ptr,
    bias_ptr,
    out_ptr,
    M,
    sizes,
    N,
    K: constexpr,
    BLOCK_M: constexpr,
    BLOCK_N: constexpr,
    BLOCK_K: constexpr,
    PARTS: constexpr,
    GATE: constexpr,
    PDL: constexpr,
):
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    x_at = at(x, m, sizes)
    multiply_parts(
        x_at,
        weight_ptr,
        None,
        bias_ptr,
        out_ptr,
        m,
        M,
        N,
        K,
        False,
        False,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
        PARTS,
        PDL,
        GATE,
    )


def multiply(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tile: Tile | None = None,
    out_dtype: torch.dtype | None = None,
    gate: GateConstants | None = None,
) -> Tensor:
    """x @ weight.T + bias, or the gate of it, in out_dtype (None: that of x). tile: None for that
    of the table.
    """
    n, k = weight.shape
    out = x.new_empty((*x.shape[:-1], n // 2 if gate is not None else n), dtype=out_dtype)
    if rows := num_rows(x):
        if tile is None and gate is not None and rows == 1:
            tile = LINEAR_GATED.choose(x.device, k, k % 2048)
        tile = tile or LINEAR.choose(x.device, rows, n, k, k % 2048)
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
            rows_of(x),
            weight,
            bias,
            out,
            rows,
            inner_sizes(x),
            n,
            K=k,
            BLOCK_M=tile.rows,
            BLOCK_N=tile.weight_rows,
            BLOCK_K=tile.columns,
            num_warps=tile.warps,
            num_stages=tile.stages,
            GATE=gate,
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
def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return multiply(x, weight, bias)


@ops.linear_fp32.kernel(
    "triton", tokens=ops.Tokens(1, MAX_ROWS), refuses=refuse_linear, tuned_for=LINEAR.archs
)
def linear_fp32(x: Tensor, weight: Tensor) -> Tensor:
    return multiply(x, weight, None, out_dtype=torch.float32)


def refuse_linear_gated(
    platform: Platform, x: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Refusal | None:
    if reason := refuse_linear(platform, x, weight, bias):
        return reason
    if weight.shape[1] == 2560:  # H200, us, two kernels / one: 2560->2x9728 26.7 / 27.9
        return Refusal("slower", "rows of 2560 columns are read slower from two places")
    return None


@ops.linear_gated.kernel(
    "triton",
    tokens=ops.Tokens(1, MAX_ROWS),
    refuses=refuse_linear_gated,
    tuned_for=LINEAR_GATED.archs,
)
def linear_gated(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    return multiply(x, weight, bias, gate=GateConstants(activation, False, 1.0, None))
