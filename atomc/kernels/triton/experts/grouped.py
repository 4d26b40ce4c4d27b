"""Products of rows with the weights of their experts, in Triton.

T tokens, k choices of each, P = T * k pairs; pair p is choice p % k of token p // k. E experts.
`expert_sort` arranges the pairs in blocks of one expert each; a product takes one block and a tile
of the rows of that expert's weight. Rows of x are gathered, and results are scattered, by the
numbers of the pairs: neither x nor a result is copied into another order. Nothing here waits for
the device, and nothing adds atomically: results do not vary from run to run, and a CUDA graph can
capture it.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from atomc.kernels.triton.experts.expert_sort import Routing
from atomc.kernels.triton.launch.launch import let_next_start, overlap, tile_of, wait_for_last
from atomc.kernels.triton.launch.tile_table import Launch
from atomc.kernels.triton.rows.gate import GateConstants, activated


@triton.jit
def pairs_of(order_ptr, block, P, BLOCK_M: constexpr):
    """The numbers of the pairs of a block, P where there is none; without an order it is one."""
    m = tl.arange(0, BLOCK_M)
    if order_ptr is None:
        return tl.where(m == 0, block, P)
    else:
        return tl.load(order_ptr + block * BLOCK_M + m)


@triton.jit
def weight_rows(index, tile, N: constexpr, BLOCK_N: constexpr, GATE: constexpr, PAIRED: constexpr):
    """The rows of the weight at these indices of a tile of BLOCK_N; some may be behind the last.
    With a GATE, columns j of gate and up are in one tile: side by side if PAIRED, else in its
    halves.

    N  columns of the result: half the rows of the weight if there is a GATE
    """
    if GATE is None or GATE.interleaved:
        return tile * BLOCK_N + index
    else:
        HALF: constexpr = BLOCK_N // 2
        part, inside = (index % 2, index // 2) if PAIRED else (index // HALF, index % HALF)
        return part * N + tile * HALF + inside


@triton.jit
def store_pairs(
    sums,
    bias,
    out_ptr,
    expert,
    pair,
    P,
    row,
    tile,
    N: constexpr,
    GATE: constexpr,
    PAIRED: constexpr,
):
    """Store a tile of sums [BLOCK_M, BLOCK_N] fp32 plus bias, gated if there is a GATE, in the rows
    of their pairs.
    """
    DTYPE: constexpr = out_ptr.dtype.element_ty
    BLOCK_M: constexpr = sums.shape[0]
    BLOCK_N: constexpr = sums.shape[1]
    if bias.ptr is not None:
        ROWS: constexpr = N if GATE is None else 2 * N
        bias_at = bias.ptr + expert.to(tl.int64) * bias.expert + row
        sums += tl.load(bias_at, row < ROWS, 0.0).to(tl.float32)[None, :]
    at = pair.to(tl.int64)[:, None] * N
    out = sums.to(DTYPE)
    if GATE is None:
        tl.store(out_ptr + at + row[None, :], out, (pair < P)[:, None] & (row < N)[None, :])
    else:
        HALF: constexpr = BLOCK_N // 2
        if PAIRED:
            gate, up = tl.split(tl.reshape(out, (BLOCK_M, HALF, 2)))
        else:
            gate, up = tl.split(tl.permute(tl.reshape(out, (BLOCK_M, 2, HALF)), (0, 2, 1)))
        half = tile * HALF + tl.arange(0, HALF)
        tl.store(
            out_ptr + at + half[None, :],
            activated(gate, up, GATE, DTYPE),
            (pair < P)[:, None] & (half < N)[None, :],
        )


@triton.jit
def square_scale(x_at, weight_at, up, in_x, in_weight, SQUARES: constexpr, SWAP: constexpr):
    """The products of the scales of x [BLOCK_M] and of the weight, in the shape of the sums.

    SQUARES  that the rows of the weight are in: 1; or 2, even rows (gate) in one, odd ones (up) in
             that `up` elements further; 0: a scale is read per row
    """
    of_x = tl.load(x_at, in_x, 0.0)
    if SQUARES == 1:
        scale = of_x * tl.load(weight_at)
        return scale[None, :] if SWAP else scale[:, None]
    else:
        if SQUARES == 2:
            odd = tl.arange(0, in_weight.shape[0]) % 2 == 1
            of_weight = tl.where(odd, tl.load(weight_at + up), tl.load(weight_at))
        else:
            of_weight = tl.load(weight_at, in_weight, 0.0)
        if SWAP:
            return of_weight[:, None] * of_x[None, :]
        else:
            return of_x[:, None] * of_weight[None, :]


@triton.jit
def _batch_rows(num_tokens_ptr, block, P, capacity, BLOCK_M: constexpr):
    """The expert of a block of a batch [E, capacity, ...], -1 where it uses none of these rows; and
    their numbers, P where there is none.
    """
    blocks = tl.cdiv(capacity, BLOCK_M)
    expert = block // blocks
    m = block % blocks * BLOCK_M + tl.arange(0, BLOCK_M)
    used = tl.load(num_tokens_ptr + expert)
    rows = tl.where(m < used, expert * capacity + m, P)
    return tl.where(block % blocks * BLOCK_M < used, expert, -1), rows


@triton.jit(do_not_specialize=["P", "blocks", "capacity"])
def _product(
    x,
    x_scale,
    weight,
    weight_scale,
    bias,
    out_ptr,
    routing,
    P,
    blocks,
    per_row,
    capacity,
    E: constexpr,
    N: constexpr,
    K: constexpr,
    GATE: constexpr,
    PAIRED: constexpr,
    SQUARE: constexpr,
    SQUARES: constexpr,
    BLOCK_M: constexpr,
    BLOCK_N: constexpr,
    BLOCK_K: constexpr,
    TALL: constexpr,
    PDL: constexpr,
):
    """x of pair p is in row p // per_row. SQUARE: the size of the squares that share a scale of the
    weight, 0 for scales of rows; SQUARES: see _squares. capacity: of a batch; routing.expert has
    the numbers of rows that its experts use.
    """
    # Rows of the weight go down the tile of the tensor cores, which is 64 high.
    SWAP: constexpr = BLOCK_M < 64
    wait_for_last(PDL)
    ROWS: constexpr = N if GATE is None else 2 * N
    block, tile = tile_of(blocks, tl.cdiv(ROWS, BLOCK_N), TALL)
    if capacity is None:
        expert = tl.load(routing.expert + block)
    else:
        expert, rows = _batch_rows(routing.expert, block, P, capacity, BLOCK_M)
    if (expert >= 0) & (expert < E):
        pair = pairs_of(routing.order, block, P, BLOCK_M) if capacity is None else rows
        n = tl.arange(0, BLOCK_N)
        row = weight_rows(n, tile, N, BLOCK_N, GATE, PAIRED)
        x_of = pair // per_row
        k = tl.arange(0, BLOCK_K)
        x_at = x.ptr + x_of.to(tl.int64)[:, None] * x.row + k[None, :]
        weight_at = weight.ptr + expert.to(tl.int64) * weight.expert
        weight_at += row[:, None] * weight.row + k[None, :] * weight.column
        FP8: constexpr = x.ptr.dtype.element_ty == tl.float8e4nv
        WIDE: constexpr = tl.int32 if x.ptr.dtype.element_ty == tl.int8 else tl.float32
        sums = tl.zeros((BLOCK_N, BLOCK_M) if SWAP else (BLOCK_M, BLOCK_N), WIDE)
        if weight_scale.ptr is not None:
            scale_at = weight_scale.ptr + expert.to(tl.int64) * weight_scale.expert
            if SQUARES:
                scale_at += tile * (BLOCK_N // SQUARES) // SQUARE * weight_scale.row
            else:
                scale_at += (row // SQUARE if SQUARE else row) * weight_scale.row
        for start in range(0, K, BLOCK_K):
            in_x, in_weight = (pair < P)[:, None], (row < ROWS)[:, None]
            if K % BLOCK_K:
                there = (k < K - start)[None, :]
                in_x, in_weight = in_x & there, in_weight & there
            codes = tl.load(x_at + start, in_x, 0.0)
            of_rows = tl.load(weight_at + start * weight.column, in_weight, 0.0)
            if SQUARE:
                scale = square_scale(
                    x_scale.ptr + x_of * x_scale.row + start // SQUARE * x_scale.column,
                    scale_at + start // SQUARE * weight_scale.column,
                    N // SQUARE * weight_scale.row,
                    pair < P,
                    row < ROWS,
                    SQUARES,
                    SWAP,
                )
            left, right = (of_rows, tl.trans(codes)) if SWAP else (codes, tl.trans(of_rows))
            if SQUARE:
                sums += tl.dot(left, right, out_dtype=WIDE) * scale
            elif FP8:  # tensor cores accumulate fp8 products with 14 bits
                sums += tl.dot(left, right, out_dtype=WIDE)
            else:
                sums = tl.dot(left, right, sums, input_precision="ieee", out_dtype=WIDE)
        let_next_start(PDL)
        out = (tl.trans(sums) if SWAP else sums).to(tl.float32)
        if weight_scale.ptr is not None and not SQUARE:
            out *= tl.load(x_scale.ptr + x_of * x_scale.row, pair < P, 0.0)[:, None]
            out *= tl.load(scale_at, row < ROWS, 0.0)[None, :]
        store_pairs(out, bias, out_ptr, expert, pair, P, row, tile, N, GATE, PAIRED)


class Matrices(NamedTuple):
    """[E, rows, columns], or a part of these dimensions, as one argument of a kernel. No memory: an
    absent operand; Triton 3.6 cannot compare a tuple with None.
    """

    ptr: Tensor | None
    expert: int | None = None
    row: int | None = None
    column: int | None = None


# 4-bit codes of a weight, their scales and zeros, and the bias.
Codes = tuple[Tensor, Tensor, Tensor | None, Tensor | None]


def _squares(square: int, block: int, rows: int, gate: GateConstants | None, paired: bool) -> int:
    """In how many squares the rows of the weight in a tile of `block` are: 1; 2 if gate and up are
    in one each; 0: in any number, or there are no squares.
    """
    if not square:
        return 0
    if gate is None or gate.interleaved:
        return 1 if square % block == 0 else 0
    return 2 if paired and rows // 2 % square == 0 and 2 * square % block == 0 else 0


def _scales(
    x_scale: Tensor | None, weight_scale: Tensor | None, square: int
) -> tuple[Matrices, Matrices]:
    """Both as arguments; the stride is 0 where one scale serves all."""
    if x_scale is None or weight_scale is None:
        return Matrices(None), Matrices(None)
    if square:
        return Matrices(x_scale, None, *x_scale.stride()), Matrices(
            weight_scale, *weight_scale.stride()
        )
    by_row = weight_scale.stride(1) if weight_scale.shape[1] > 1 else 0
    return Matrices(x_scale, row=x_scale.stride(0) if x_scale.dim() > 1 else 0), Matrices(
        weight_scale, weight_scale.stride(0), by_row
    )


def launch_pairs(
    kernel: triton.JITFunction,
    x: Tensor,
    weight: Sequence[object],
    bias: Tensor | None,
    routing: Routing,
    pairs: int,
    rows: int,
    tile: Launch,
    out_dtype: torch.dtype,
    gate: GateConstants | None,
    out: Tensor | None = None,
    blocks: int = 0,
    **constants: object,
) -> Tensor:
    """x @ weight.T + bias of the expert of each pair, [P, rows] in out_dtype, or
    atomc.ops.experts.gated of them, [P, rows/2]; rows of pairs that are not in the routing are not
    written.

    x, bias  [T, K], or [P, K] with a row per pair, contiguous rows; [E, rows], likewise
    weight   the kernel's arguments between x and the bias
    tile     BLOCK_M pairs, BLOCK_N rows of weight (of gate and up together), and the like
    """
    n = rows if gate is None else rows // 2
    out = x.new_empty((pairs, n), dtype=out_dtype) if out is None else out
    if pairs:
        blocks = blocks or len(routing.expert)
        kernel[(blocks * triton.cdiv(rows, tile["BLOCK_N"]),)](
            Matrices(x, row=x.stride(0)),
            *weight,
            Matrices(bias, None if bias is None else bias.stride(0)),
            out,
            routing,
            pairs,
            blocks,
            pairs // len(x),
            N=n,
            GATE=gate,
            **constants,
            **tile,
            **overlap(x.device),
        )
    return out


def grouped_product(
    x: Tensor,
    x_scale: Tensor | None,
    weight: Tensor,
    weight_scale: Tensor | None,
    bias: Tensor | None,
    routing: Routing,
    tile: Launch,
    pairs: int,
    out_dtype: torch.dtype,
    square: int = 0,
    gate: GateConstants | None = None,
    out: Tensor | None = None,
    capacity: int | None = None,
) -> Tensor:
    """launch_pairs for numbers, or for codes of 8 bits with scales.

    weight   [E, N, K] of the dtype of x, of any strides with one of 1 in the last two dimensions
    scales   of x and weight in fp8 or int8, fp32: [1] or one per row of x, and [E, 1, 1] or
             [E, N, 1]; or, by squares, [.., ceil(K / square)] and [E, ceil(N / square),
             ceil(K / square)]
    tile     BLOCK_N, BLOCK_K, TALL and launch options; square is 0 or a multiple of BLOCK_K
    out      for the result, which is allocated otherwise
    capacity  rows of an expert in a batch, of which it uses routing.expert [E], the first ones
    """
    experts, rows, columns = weight.shape
    # Where neighbouring rows of the weight are neighbours in memory, they stay together.
    paired = bool(gate and gate.interleaved) or weight.stride(2) == 1
    of_x, of_weight = _scales(x_scale, weight_scale, square)
    return launch_pairs(
        _product,
        x,
        (of_x, Matrices(weight, *weight.stride()), of_weight),
        bias,
        routing,
        pairs,
        rows,
        tile,
        out_dtype,
        gate,
        out,
        experts * triton.cdiv(capacity or 0, tile["BLOCK_M"]),
        capacity=capacity,
        E=experts,
        K=columns,
        PAIRED=paired,
        SQUARE=square,
        SQUARES=_squares(square, tile["BLOCK_N"], rows, gate, paired),
    )
