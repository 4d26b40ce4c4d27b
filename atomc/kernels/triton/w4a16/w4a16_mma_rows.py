"""Linear layers of some rows with 4-bit weights in the order of fragments.py, in Triton for NVIDIA
GPUs: codes are unpacked in the registers from which tensor cores read them.

M rows of x, N rows of the weight, a multiple of STRIP, K columns.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from atomc.kernels.triton.launch.launch import let_next_start, num_rows, overlap, wait_for_last
from atomc.kernels.triton.launch.tile_table import StripTile
from atomc.kernels.triton.launch.tiles import LINEAR_4_BITS
from atomc.kernels.triton.w4a16.fragment_products import add_part, fragment_weight, number_types
from atomc.kernels.triton.w4a16.fragments import E2M1_UNIT, STRIP, fragment_row, strip_offset


@triton.jit(do_not_specialize=["M"])
def _rows(
    x_ptr,
    weight,
    bias_ptr,
    out_ptr,
    M,
    N,
    K: constexpr,
    GROUP: constexpr,
    INT4: constexpr,
    SIXTEEN: constexpr,
    NUMBER: constexpr,
    BLOCK_M: constexpr,
    BLOCK_N: constexpr,
    SPLITS: constexpr,
    num_warps: constexpr,
    PDL: constexpr,
):
    """out [SPLITS, M, N]: a program sums one of the splits of K."""
    PARTS: constexpr = (K + 127) // 128
    LENGTH: constexpr = (PARTS + SPLITS - 1) // SPLITS
    WHOLE: constexpr = SPLITS * LENGTH * 128 == K
    wait_for_last(PDL)
    first = tl.program_id(2) * LENGTH
    place = tl.arange(0, BLOCK_N)[:, None]
    row = tl.program_id(1) * BLOCK_N + place
    read = tl.program_id(1) * BLOCK_N + fragment_row(place, num_warps)
    words_at = weight.words + (read // STRIP * PARTS + first).to(tl.int64) * (STRIP * 16)
    words_at += read % STRIP * 16 + tl.arange(0, 16)[None, :]
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    k = first * 128 + tl.arange(0, 128)[None, :]
    x_at = x_ptr + m.to(tl.int64) * K + k
    sums = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for part in range(LENGTH):
        inside, in_rows, in_x = read < N, row < N, m < M
        if not WHOLE:
            inside = inside & (first + part < PARTS)
            in_rows = in_rows & (first + part < PARTS)
            in_x = in_x & (k < K - part * 128)
        words = tl.reshape(tl.load(words_at + part * (STRIP * 16), inside, 0), (BLOCK_N, 4, 4))
        x = tl.load(x_at + part * 128, in_x, 0.0).to(NUMBER)
        sums = add_part(
            sums,
            x,
            words,
            weight,
            strip_offset(read, first + part, PARTS) + tl.zeros((1, 4), tl.int32),
            strip_offset(row, first + part, PARTS),
            inside,
            in_rows,
            GROUP,
            INT4,
            SIXTEEN,
            num_warps,
            BLOCK_M < 16,
        )
    let_next_start(PDL)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    out = tl.trans(sums if INT4 else sums * E2M1_UNIT)
    if bias_ptr is not None:
        out += tl.load(bias_ptr + n, n < N, 0.0).to(tl.float32)
    at = (tl.program_id(2) * M + m).to(tl.int64) * N + n
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), (m < M) & (n < N))


@triton.jit(do_not_specialize=["size"])
def _sum_splits(
    sums_ptr,
    bias_ptr,
    out_ptr,
    size,
    N,
    SPLITS: constexpr,
    BLOCK: constexpr,
    PDL: constexpr,
):
    wait_for_last(PDL)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    out = tl.zeros((BLOCK,), tl.float32)
    for split in tl.static_range(SPLITS):
        out += tl.load(sums_ptr + split * size + at, inside, 0.0)
    let_next_start(PDL)
    if bias_ptr is not None:
        out += tl.load(bias_ptr + at % N, inside, 0.0).to(tl.float32)
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), inside)


def multiply(
    x: Tensor,
    words: Tensor,
    scale: Tensor,
    zeros: Tensor | None,
    bias: Tensor | None,
    group: int,
    tile: StripTile | None = None,
    *,
    int4: bool = True,
) -> Tensor:
    """The op linear_w4a16, or linear_mxfp4 of bf16, of the weight, scales and zeros that
    w4a16_mma.py prepares. tile: None for that of the table.
    """
    n, k = len(words) * STRIP.value, x.shape[-1]
    out = x.new_empty((*x.shape[:-1], n))
    if rows := num_rows(out):
        tile = tile or LINEAR_4_BITS.choose(x.device, rows)
        splits = tile.splits(n, k)
        sums = out if splits == 1 else out.new_empty((splits, rows, n), dtype=torch.float32)
        _rows[(triton.cdiv(rows, tile.rows), triton.cdiv(n, tile.weight_rows), splits)](
            x.reshape(rows, k).contiguous(),
            fragment_weight(words, scale, zeros),
            bias if splits == 1 else None,
            sums,
            rows,
            n,
            K=k,
            GROUP=group,
            INT4=int4,
            **number_types(x.dtype),
            BLOCK_M=tile.rows,
            BLOCK_N=tile.weight_rows,
            SPLITS=splits,
            num_warps=tile.warps,
            num_stages=tile.stages,
            **overlap(x.device),
        )
        if splits > 1:
            _sum_splits[(triton.cdiv(rows * n, 512),)](
                sums,
                bias,
                out,
                rows * n,
                n,
                SPLITS=splits,
                BLOCK=512,
                **overlap(x.device),
            )
    return out
