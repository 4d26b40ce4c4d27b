"""Linear layers of few rows with 8-bit operands, in Triton, bound by the bandwidth of reading the
weight.

A program takes some rows of the weight and sums over all of K. Scales of rows multiply the sum;
scales of blocks of columns multiply the sum of each block. M rows of x, N rows of the weight, K
columns, G blocks of columns.
"""

from typing import Unpack

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from atomc import ops
from atomc.kernels.checks import first_refusal, no_fp8_products, unlike, wrong_result
from atomc.kernels.triton.launch.launch import (
    let_next_start,
    more_rows,
    not_nvidia,
    num_rows,
    overlap,
    scattered,
    wait_for_last,
)
from atomc.kernels.triton.launch.tile_table import Tile
from atomc.kernels.triton.launch.tiles import SCALED_LINEAR
from atomc.kernels.triton.linear.linear import Scales, multiply_parts, store_product
from atomc.ops.formats import FLOATS, HALVES
from atomc.ops.op import Refusal
from atomc.ops.scaled_linear import ScaledOperands
from atomc.platform import Platform

MAX_ROWS = 16
BLOCK = 128


@triton.jit
def _row(
    x_ptr,
    weight_ptr,
    scales,
    bias_ptr,
    out_ptr,
    M,
    N,
    K: constexpr,
    BLOCKS: constexpr,
    WHOLE: constexpr,
    BLOCK_N: constexpr,
    BLOCK_K: constexpr,
    EARLY: constexpr,
    PDL: constexpr,
):
    """One row of x a program. A thread sums CODES neighbours, one load of each operand, by itself:
    sums and scales of blocks are then held and multiplied once for CODES columns.
    """
    CODES: constexpr = 16
    WIDE: constexpr = tl.int32 if WHOLE else tl.float32
    m = tl.program_id(1)
    first = tl.program_id(0) * BLOCK_N
    n = first + tl.arange(0, BLOCK_N)
    chunk = tl.arange(0, BLOCK_K // CODES)
    k = chunk[None, :, None] * CODES + tl.arange(0, CODES)[None, None, :]
    x_at = x_ptr + m.to(tl.int64) * K + k
    weight_at = weight_ptr + n.to(tl.int64)[:, None, None] * K + k
    if EARLY:
        let_next_start(PDL)
    wait_for_last(PDL)
    sums = tl.zeros((BLOCK_N, BLOCK_K // CODES), WIDE)
    for start in tl.static_range(0, K, BLOCK_K):
        inside = k < K - start
        inside_weight = (n < N)[:, None, None] & inside
        weight = tl.load(weight_at + start, inside_weight, 0.0, cache_modifier=".cg").to(WIDE)
        x = tl.load(x_at + start, inside, 0.0).to(WIDE)
        part = tl.sum(x * weight, 2)
        if BLOCKS:
            group = (start + chunk * CODES) // 128
            there = group * 128 < K
            weight_scale_at = scales.weight + first // 128 * scales.weight_row + group
            factor = tl.load(weight_scale_at, there, 0.0)
            factor *= tl.load(scales.x + m * scales.x_row + group * scales.x_group, there, 0.0)
            part *= factor[None, :]
        sums += part
    if not EARLY:
        let_next_start(PDL)
    store_product(tl.sum(sums, 1), scales, bias_ptr, out_ptr, m, n, M, N, n < N, BLOCKS)


@triton.jit(do_not_specialize=["M"])
def _tensor_core_product(
    x_ptr,
    weight_ptr,
    scales,
    bias_ptr,
    out_ptr,
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
):
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    x_at = x_ptr + m.to(tl.int64) * K
    multiply_parts(
        x_at,
        weight_ptr,
        scales,
        bias_ptr,
        out_ptr,
        m,
        M,
        N,
        K,
        BLOCKS,
        WHOLE,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
        PARTS,
        PDL,
    )


def row_arguments(
    x: Tensor,
    weight: Tensor,
    x_scale: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    out: Tensor,
    blocks: bool,
) -> tuple[Tensor | Scales | int | None, ...]:
    """What kernels take: x and x_scale by rows, and the others."""
    rows = num_rows(out)
    by_row = x_scale.reshape(rows, -1) if blocks else x_scale.reshape(-1)
    x_row, x_group, weight_row = int(x_scale.numel() > 1), 0, int(weight_scale.numel() > 1)
    if blocks:
        (x_row, x_group), weight_row = by_row.stride(), weight_scale.stride(0)
    scales = Scales(by_row, weight_scale, x_row, x_group, weight_row)
    return x.reshape(rows, x.shape[-1]), weight, scales, bias, out, rows, len(weight)


def multiply(
    x: Tensor,
    weight: Tensor,
    x_scale: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    tile: Tile | None = None,
    blocks: bool = False,
) -> Tensor:
    """The op. `blocks`: scales are of blocks of 128. tile: None for that of the table."""
    n, k = weight.shape
    out = x.new_empty((*x.shape[:-1], n), dtype=out_dtype)
    if rows := num_rows(out):
        tile = tile or SCALED_LINEAR.choose(x.device, rows, k)
        kernel, more = (
            (_tensor_core_product, {"PARTS": tile.parts, "BLOCK_M": tile.rows})
            if tile.parts
            else (_row, {"EARLY": k >= 4096})
        )
        kernel[(triton.cdiv(n, tile.weight_rows), triton.cdiv(rows, tile.rows))](
            *row_arguments(x, weight, x_scale, weight_scale, bias, out, blocks),
            K=k,
            BLOCKS=blocks,
            WHOLE=x.dtype == torch.int8,
            BLOCK_N=tile.weight_rows,
            BLOCK_K=tile.columns,
            num_warps=tile.warps,
            num_stages=tile.stages,
            **more,
            **overlap(x.device),
        )
    return out


def refuse_scaled_linear(
    platform: Platform,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    block: int = BLOCK,
) -> Refusal | None:
    """Refuse operands that neither the kernel for few rows nor that for many rows can multiply."""
    return (
        not_nvidia(platform)
        or unlike((torch.float8_e4m3fn, torch.int8), x=x, weight=weight)
        or no_fp8_products(platform, x.dtype)
        # Sums of fp8 products are too inexact for fp32 results.
        or wrong_result(HALVES if x.dtype == torch.float8_e4m3fn else FLOATS, out_dtype)
        or unlike(FLOATS, bias=bias)
        or (Refusal("shape", f"blocks of {block}: written for {BLOCK}") if block != BLOCK else None)
        or scattered(weight)
    )


def refuse_more_rows(x: Tensor) -> Refusal | None:
    return more_rows(x, MAX_ROWS, "for which another kernel is faster")


refuse_scaled_linear_few_rows = first_refusal(refuse_scaled_linear, refuse_more_rows)


FEW = ops.Tokens(1, MAX_ROWS)


@ops.scaled_linear_fp8.kernel(
    "triton", tokens=FEW, refuses=refuse_scaled_linear_few_rows, tuned_for=SCALED_LINEAR.archs
)
def scaled_linear_fp8(**operands: Unpack[ScaledOperands]) -> Tensor:
    return multiply(**operands)


@ops.scaled_linear_fp8_block.kernel(
    "triton", tokens=FEW, refuses=refuse_scaled_linear_few_rows, tuned_for=SCALED_LINEAR.archs
)
def scaled_linear_fp8_block(**operands: Unpack[ScaledOperands]) -> Tensor:
    return multiply(**operands, blocks=True)


@ops.scaled_linear_int8.kernel(
    "triton", tokens=FEW, refuses=refuse_scaled_linear_few_rows, tuned_for=SCALED_LINEAR.archs
)
def scaled_linear_int8(**operands: Unpack[ScaledOperands]) -> Tensor:
    return multiply(**operands)
