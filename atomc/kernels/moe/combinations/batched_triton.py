"""Products of the batched format in Triton: rows of each expert with its weight, in one launch.

A program computes a tile of rows and outputs of one expert; a tile behind the last row of its
expert ends at once. Sums are in fp32 (int32 of int8 codes), and rounded once.

L experts, C rows per expert, of which num_tokens[e] are used; K inputs, N outputs.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from atomc.kernels.triton.experts.expert_gate import activated

ROWS, OUTPUTS, INPUTS = 16, 64, 64  # of a tile; not measured yet


@triton.jit
def _product(
    x_at,
    x_scale_at,
    weight_ptr,
    weight_scale_ptr,
    bias_ptr,
    row,
    inside_m,
    inside_n,
    w1,
    w2,
    s1,
    s2,
    K: tl.constexpr,
    SCALES: tl.constexpr,
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
):
    """fp32 [TILE_M, TILE_N]: rows of x with the rows `row` of a weight, scaled, plus bias."""
    k = tl.arange(0, TILE_K)
    WIDE: tl.constexpr = tl.int32 if WHOLE else tl.float32
    sums = tl.zeros((TILE_M, TILE_N), WIDE)
    for start in range(0, K, TILE_K):
        x = tl.load(x_at[:, None] + start + k[None, :], inside_m[:, None] & (k < K - start), 0.0)
        weight_at = (
            weight_ptr + row.to(tl.int64)[None, :] * w1 + (start + k).to(tl.int64)[:, None] * w2
        )
        weight = tl.load(weight_at, inside_n[None, :] & (k < K - start)[:, None], 0.0)
        if SCALES == "block":
            of_x = tl.load(x_scale_at + start // BLOCK, inside_m, 0.0)
            of_weight = tl.load(
                weight_scale_ptr + row // BLOCK * s1 + start // BLOCK * s2, inside_n, 0.0
            )
            part = tl.dot(x, weight, out_dtype=WIDE)
            sums += part * of_x[:, None] * of_weight[None, :]
        elif WHOLE:
            sums = tl.dot(x, weight, sums, out_dtype=WIDE)
        else:
            sums += tl.dot(x, weight, input_precision="ieee", out_dtype=WIDE)
    out = sums.to(tl.float32)
    if SCALES == "row":
        out *= tl.load(x_scale_at, inside_m, 0.0)[:, None]
        out *= tl.load(weight_scale_ptr + row * s1, inside_n, 0.0)[None, :]
    if bias_ptr is not None:
        out += tl.load(bias_ptr + row, inside_n, 0.0).to(tl.float32)[None, :]
    return out


@triton.jit(do_not_specialize=["C"])
def _batched(
    x_ptr,
    x_scale_ptr,
    weight_ptr,
    weight_scale_ptr,
    bias_ptr,
    num_tokens_ptr,
    out_ptr,
    C,
    N,
    w0,
    w1,
    w2,
    s0,
    s1,
    s2,
    alpha,
    limit,
    K: tl.constexpr,
    SCALES: tl.constexpr,
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,
    GATE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
):
    expert = tl.program_id(2)
    first = tl.program_id(1) * TILE_M
    used = tl.load(num_tokens_ptr + expert)
    if first >= used:
        return
    m = first + tl.arange(0, TILE_M)
    n = tl.program_id(0) * TILE_N + tl.arange(0, TILE_N)
    inside_m, inside_n = m < used, n < N
    x_row = expert.to(tl.int64) * C + m
    GROUPS: tl.constexpr = (K + BLOCK - 1) // BLOCK if SCALES == "block" else 1
    x_at, x_scale_at = x_ptr + x_row * K, x_row
    if SCALES != "none":
        x_scale_at = x_scale_ptr + x_row * GROUPS
        weight_scale_ptr += expert.to(tl.int64) * s0
    weight_ptr += expert.to(tl.int64) * w0
    gate_row = n * 2 if INTERLEAVED else n
    if bias_ptr is not None:
        bias_ptr += expert * (N if GATE == "none" else 2 * N)
    out = _product(
        x_at,
        x_scale_at,
        weight_ptr,
        weight_scale_ptr,
        bias_ptr,
        gate_row,
        inside_m,
        inside_n,
        w1,
        w2,
        s1,
        s2,
        K,
        SCALES,
        BLOCK,
        WHOLE,
        TILE_M,
        TILE_N,
        TILE_K,
    )
    if GATE != "none":
        up = _product(
            x_at,
            x_scale_at,
            weight_ptr,
            weight_scale_ptr,
            bias_ptr,
            gate_row + (1 if INTERLEAVED else N),
            inside_m,
            inside_n,
            w1,
            w2,
            s1,
            s2,
            K,
            SCALES,
            BLOCK,
            WHOLE,
            TILE_M,
            TILE_N,
            TILE_K,
        )
        out = activated(out, up, alpha, limit, GATE, tl.float32)
    tl.store(
        out_ptr + x_row[:, None] * N + n[None, :],
        out.to(out_ptr.dtype.element_ty),
        inside_m[:, None] & inside_n[None, :],
    )


def batched_product(
    x: Tensor,
    x_scale: Tensor | None,
    weight: Tensor,
    weight_scale: Tensor | None,
    bias: Tensor | None,
    num_tokens: Tensor,
    out: Tensor,
    *,
    block: int = 0,
    activation: str = "none",
    interleaved: bool = False,
    alpha: float = 1.702,
    limit: float | None = None,
) -> None:
    """Writes out[e, c] = weight[e] @ x[e, c] + bias[e] for c < num_tokens[e]; other rows keep what
    they have. With an activation, weight has 2 N rows, and out the gated ones, as
    atomc.ops.experts.gated computes them, unrounded in between.

    x [L, C, K] and out [L, C, N] contiguous; weight [L, N, K] or [L, 2N, K]; bias [L, N] or
    [L, 2N] contiguous; num_tokens [L] int32
    x_scale, weight_scale  of codes: [L, C, 1], and [L, rows, 1] or [L, 1, 1]; with `block`: [L, C,
                           ceil(K / block)] and [L, ceil(rows / block), ceil(K / block)]
    """
    experts, capacity, k = x.shape
    n = out.shape[-1]
    if not out.numel():
        return
    scales = "none" if x_scale is None else "block" if block else "row"
    s0, s1, s2 = (0, 0, 0) if weight_scale is None else weight_scale.stride()
    if weight_scale is not None and weight_scale.shape[1] == 1 and not block:
        s1 = 0
    grid = (triton.cdiv(n, OUTPUTS), triton.cdiv(capacity, ROWS), experts)
    _batched[grid](
        x,
        x_scale,
        weight,
        weight_scale,
        bias,
        num_tokens,
        out,
        capacity,
        n,
        *weight.stride(),
        s0,
        s1,
        s2,
        alpha,
        limit,
        K=k,
        SCALES=scales,
        BLOCK=block,
        WHOLE=x.dtype == torch.int8,
        GATE=activation,
        INTERLEAVED=interleaved,
        TILE_M=ROWS,
        TILE_N=OUTPUTS,
        TILE_K=math.gcd(block, INPUTS) if block else INPUTS,  # with one scale
    )
