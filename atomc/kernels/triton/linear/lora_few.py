"""LoRA adapters of few rows in Triton, one row per program: what a decode step waits for is not the
bytes of the adapters but two dependent kernels per layer.

Both are therefore short: they start before the preceding kernel ends, and read the weights of the
adapter before they wait for it. The first sums parts of K, which the second adds in a fixed order.

M rows, L adapters, r their rank, P merged layers (R = P * r rows of A), K inputs, N outputs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from atomc.kernels.triton.launch.launch import let_next_start, overlap, wait_for_last
from atomc.kernels.triton.launch.tile_table import LoraTile

MAX_ROWS = 16
# An adapter's number is a step's input, and its weights are written between steps: no kernel of a
# step writes them, so that they may be read before the preceding kernel has ended.


@triton.jit
def layer_of(n, ENDS: constexpr):
    """The number of the merged layer of columns n of y; ENDS: where each ends."""
    return (n >= ENDS[0]).to(tl.int32) + (n >= ENDS[1]).to(tl.int32) + (n >= ENDS[2]).to(tl.int32)


@triton.jit(do_not_specialize=["M"])
def _shrink_row(
    x_ptr,
    a_ptr,
    rows_ptr,
    thin_ptr,
    M,
    x_stride,
    K: constexpr,
    R: constexpr,
    BLOCK_R: constexpr,
    BLOCK_K: constexpr,
    PDL: constexpr,
):
    let_next_start(PDL)
    part, m = tl.program_id(0), tl.program_id(2).to(tl.int64)
    r = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    k = part * BLOCK_K + tl.arange(0, BLOCK_K)
    adapter = tl.load(rows_ptr + m).to(tl.int64)
    there = (r < R) & (adapter >= 0)
    a_at = a_ptr + (adapter * R + r)[:, None] * K + k[None, :]
    a = tl.load(a_at, there[:, None] & (k < K)[None, :], 0.0)
    # Every program waits: the next kernel relies on the end of all that precede this one.
    wait_for_last(PDL)
    if adapter >= 0:
        x = tl.load(x_ptr + m * x_stride + k, k < K, 0.0)
        sums = tl.sum(a.to(tl.float32) * x.to(tl.float32)[None, :], 1)
        tl.store(thin_ptr + (part * M + m) * R + r, sums, there)


@triton.jit(do_not_specialize=["M"])
def _expand_row(
    y_ptr,
    b_ptr,
    rows_ptr,
    thin_ptr,
    out_ptr,
    M,
    y_stride,
    ENDS: constexpr,
    N: constexpr,
    R: constexpr,
    RANK: constexpr,
    PARTS: constexpr,
    BLOCK_N: constexpr,
    BLOCK_R: constexpr,
    PDL: constexpr,
):
    let_next_start(PDL)
    first, m = tl.program_id(0) * BLOCK_N, tl.program_id(1).to(tl.int64)
    n, r, part = (
        first + tl.arange(0, BLOCK_N),
        tl.arange(0, BLOCK_R),
        tl.arange(0, triton.next_power_of_2(PARTS)),
    )
    adapter = tl.load(rows_ptr + m).to(tl.int64)
    b_at = b_ptr + (adapter * RANK + r)[:, None] * N + n[None, :]
    b = tl.load(b_at, (r < RANK)[:, None] & (n < ENDS[3])[None, :] & (adapter >= 0), 0.0)
    layer = layer_of(n, ENDS)
    wait_for_last(PDL)
    y = tl.load(y_ptr + m * y_stride + n, n < N, 0.0)
    delta = tl.zeros((BLOCK_N,), tl.float32)
    if adapter >= 0:
        there = (part < PARTS)[:, None] & (r < RANK)[None, :]
        # Columns of a merged layer are multiplied with its own rows of A.
        for own in tl.static_range(R // RANK):
            if (own >= tl.min(layer, 0)) & (own <= tl.max(layer, 0)):
                thin_at = thin_ptr + (part[:, None] * M + m) * R + own * RANK + r[None, :]
                thin = tl.sum(tl.load(thin_at, there, 0.0), 0).to(b.dtype).to(tl.float32)
                sums = tl.sum(thin[:, None] * b.to(tl.float32), 0)
                delta = tl.where(layer == own, sums, delta)
    # As the reference rounds: the product, then the sum.
    total = y.to(tl.float32) + delta.to(y.dtype).to(tl.float32)
    tl.store(out_ptr + m * N + n, total.to(out_ptr.dtype.element_ty), n < N)


def lora_linear(
    y: Tensor,
    x: Tensor,
    a: Tensor,
    b: Tensor,
    rows: Tensor,
    ends: tuple[int, ...],
    tile: LoraTile,
) -> Tensor:
    """The op, of y [M, N] and x [M, K]. ends: those of the merged layers in y, four of them."""
    _, thin_size, depth = a.shape
    _, rank, outputs = b.shape
    count = len(x)
    out = y.new_empty((count, outputs))
    block_k = min(tile.inputs, triton.next_power_of_2(depth))
    block_r = triton.next_power_of_2(rank)
    block_n = max(32, tile.products // block_r)
    parts = triton.cdiv(depth, block_k)
    thin = x.new_empty((parts, count, thin_size), dtype=torch.float32)
    _shrink_row[(parts, triton.cdiv(thin_size, tile.thin), count)](
        x,
        a,
        rows,
        thin,
        count,
        x.stride(0),
        K=depth,
        R=thin_size,
        BLOCK_R=tile.thin,
        BLOCK_K=block_k,
        num_warps=tile.warps,
        **overlap(x.device),
    )
    _expand_row[(triton.cdiv(outputs, block_n), count)](
        y,
        b,
        rows,
        thin,
        out,
        count,
        y.stride(0),
        ENDS=ends,
        N=outputs,
        R=thin_size,
        RANK=rank,
        PARTS=parts,
        BLOCK_N=block_n,
        BLOCK_R=block_r,
        num_warps=tile.expand_warps,
        **overlap(x.device),
    )
    return out
