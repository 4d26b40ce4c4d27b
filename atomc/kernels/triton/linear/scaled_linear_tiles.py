"""Linear layers of many rows with 8-bit operands, in Triton: a tiled matrix product.

With blocks of 128, the sum of each block is multiplied by its two scales in fp32. Tensor cores
accumulate fp8 products with 14 bits; here at most 128 products, before the sum is added in fp32.
Letters as in scaled_linear.py.
"""

from typing import Unpack

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from atomc import ops
from atomc.kernels.checks import first_refusal
from atomc.kernels.triton.launch.launch import num_rows, tile_of
from atomc.kernels.triton.launch.tiles import SCALED_LINEAR_BLOCK_TILES, SCALED_LINEAR_TILES
from atomc.kernels.triton.linear.linear import store_product
from atomc.kernels.triton.linear.scaled_linear import refuse_scaled_linear, row_arguments
from atomc.ops.op import Refusal
from atomc.ops.scaled_linear import ScaledOperands


@triton.jit(do_not_specialize=["M"])
def _tiles(
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
    TALL: constexpr,
):
    down, across = tile_of(tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), TALL)
    first = across * BLOCK_N
    m = down * BLOCK_M + tl.arange(0, BLOCK_M)
    n = first + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    x_at = x_ptr + m.to(tl.int64)[:, None] * K + k[None, :]
    weight_at = weight_ptr + n.to(tl.int64)[None, :] * K + k[:, None]
    WIDE: constexpr = tl.int32 if WHOLE else tl.float32
    sums = tl.zeros((BLOCK_M, BLOCK_N), WIDE)
    for start in range(0, K, BLOCK_K):
        in_x, in_weight = (m < M)[:, None], (n < N)[None, :]
        if K % BLOCK_K:
            in_x, in_weight = in_x & (k < K - start)[None, :], in_weight & (k < K - start)[:, None]
        x = tl.load(x_at + start, in_x, 0.0)
        weight = tl.load(weight_at + start, in_weight, 0.0)
        if BLOCKS:
            x_scale_at = scales.x + m * scales.x_row + start // 128 * scales.x_group
            factor = tl.load(scales.weight + (first // 128) * scales.weight_row + start // 128)
            factor *= tl.load(x_scale_at, m < M, 0.0)
            sums += tl.dot(x, weight, out_dtype=WIDE) * factor[:, None]
        elif WHOLE:
            sums = tl.dot(x, weight, sums, out_dtype=WIDE)
        else:
            sums += tl.dot(x, weight, out_dtype=WIDE)
    m, n = m[:, None], n[None, :]
    store_product(sums, scales, bias_ptr, out_ptr, m, n, M, N, (m < M) & (n < N), BLOCKS)


def multiply(
    x: Tensor,
    weight: Tensor,
    x_scale: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    blocks: bool = False,
) -> Tensor:
    n, k = weight.shape
    out = x.new_empty((*x.shape[:-1], n), dtype=out_dtype)
    if rows := num_rows(out):
        table = SCALED_LINEAR_BLOCK_TILES if blocks else SCALED_LINEAR_TILES
        tile = table.choose(x.device, rows, n)
        _tiles[(triton.cdiv(rows, tile["BLOCK_M"]) * triton.cdiv(n, tile["BLOCK_N"]),)](
            *row_arguments(x, weight, x_scale, weight_scale, bias, out, blocks),
            K=k,
            BLOCKS=blocks,
            WHOLE=x.dtype == torch.int8,
            **tile,
        )
    return out


def refuse_even_weight(weight: Tensor) -> Refusal | None:
    if not any(size % 16 for size in weight.shape):
        return Refusal(
            "slower", "rows and columns of the weight are multiples of 16, where cuBLAS is faster"
        )
    return None


@ops.scaled_linear_fp8.kernel(
    "triton",
    refuses=first_refusal(refuse_scaled_linear, refuse_even_weight),
    tuned_for=SCALED_LINEAR_TILES.archs,
)
def scaled_linear_fp8(**operands: Unpack[ScaledOperands]) -> Tensor:
    return multiply(**operands)


@ops.scaled_linear_fp8_block.kernel(
    "triton", refuses=refuse_scaled_linear, tuned_for=SCALED_LINEAR_BLOCK_TILES.archs
)
def scaled_linear_fp8_block(**operands: Unpack[ScaledOperands]) -> Tensor:
    return multiply(**operands, blocks=True)


@ops.scaled_linear_int8.kernel(
    "triton", refuses=refuse_scaled_linear, tuned_for=SCALED_LINEAR_TILES.archs
)
def scaled_linear_int8(**operands: Unpack[ScaledOperands]) -> Tensor:
    return multiply(**operands)
