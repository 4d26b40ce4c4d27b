"""Linear layers of some rows with int4 weights, in Triton for NVIDIA GPUs: codes are unpacked in
the registers from which tensor cores read them.

M rows of x, N rows of the weight, K columns; groups of columns share a scale. The order of columns
in a product is free, if x has the same: with that of fragments.py, a thread multiplies 16 adjacent
bytes of the weight as they are in memory. Of 128 columns, thread q of a row has words 4q to 4q + 3;
pair j of a word is its codes j and j + 4.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from atomc.kernels.triton.fragments import doubled, fragment_row, fragments, minus_zero
from atomc.kernels.triton.launch import (
    TRITON_DTYPE,
    let_next_start,
    num_rows,
    overlap,
    wait_for_last,
)
from atomc.kernels.triton.tile_table import Int4Tile
from atomc.kernels.triton.tiles import LINEAR_INT4_ROWS
from atomc.ops.formats import HALVES


@triton.jit
def _element(words_ptr, at, inside, BYTES: tl.constexpr):
    """Element `at`, of one or two bytes, in the lowest bits of an int32, of an array that is read
    four bytes at a time: less are not copied while the products before are computed.
    """
    # Claims not to be contiguous, so that each of the four threads of a row reads its own.
    word = tl.load(words_ptr + tl.multiple_of((at * BYTES) >> 2, (1, 1)), inside, 0)
    return (word >> ((at * BYTES & 3) * 8)) & (256**BYTES - 1)


@triton.jit(do_not_specialize=["M"])
def _rows(
    x_ptr,
    words_ptr,
    scale_ptr,
    zeros_ptr,
    bias_ptr,
    out_ptr,
    M,
    N,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    SIXTEEN: tl.constexpr,
    NUMBER: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,
    num_warps: tl.constexpr,
    PDL: tl.constexpr,
):
    """out [SPLITS, M, N]: a program sums one of the splits of K."""
    LENGTH: tl.constexpr = (K + SPLITS * 128 - 1) // (SPLITS * 128) * 128
    WHOLE: tl.constexpr = SPLITS * LENGTH == K
    wait_for_last(PDL)
    first = tl.program_id(2) * LENGTH
    # In the order of fragments().
    row = tl.program_id(0) * BLOCK_N + fragment_row(tl.arange(0, BLOCK_N), num_warps)[:, None]
    words_at = words_ptr + row.to(tl.int64) * (K // 8) + first // 8 + tl.arange(0, 16)[None, :]
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    k = first + tl.arange(0, 128)[None, :]
    x_at = x_ptr + m.to(tl.int64) * K + k
    sums = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for start in range(0, LENGTH, 128):
        column = first + start + tl.arange(0, 4)[None, :] * 32
        inside, in_groups, in_x = row < N, row < N, m < M
        if not WHOLE:
            inside = (row < N) & (first + start + tl.arange(0, 16)[None, :] * 8 < K)
            in_groups = (row < N) & (column < K)
            in_x = (m < M) & (k < K - start)
        words = tl.reshape(tl.load(words_at + start // 8, inside, 0), (BLOCK_N, 4, 4))
        group = row * (K // GROUP) + column // GROUP
        factor = doubled(_element(scale_ptr, group, in_groups, 2))
        if zeros_ptr is None:
            zero = tl.full((1, 1), 8.0, tl.float32)
        else:
            zero = _element(zeros_ptr, group, in_groups, 1).to(tl.float32)
        factor = tl.broadcast_to(factor[:, :, None], words.shape)
        added = tl.broadcast_to(minus_zero(zero, SIXTEEN)[:, :, None], words.shape)
        weight = fragments(words, added, factor, num_warps, SIXTEEN, NUMBER, BLOCK_M < 16)
        x = tl.load(x_at + start, in_x, 0.0).to(NUMBER)
        # Columns [q, g, h, j] -> [g, j, q, h]
        x = tl.permute(tl.reshape(x, (BLOCK_M, 4, 4, 2, 4)), (0, 2, 4, 1, 3))
        x = tl.trans(tl.reshape(x, (BLOCK_M, 128)))
        sums = tl.dot(weight, x, sums, input_precision="ieee")
    let_next_start(PDL)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    out = tl.trans(sums)
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
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
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


def serves(x: Tensor, scale: Tensor, zeros: Tensor | None) -> bool:
    return (
        num_rows(x) > 1
        and x.dtype in HALVES
        and scale.dtype == x.dtype
        and _fits_words(scale)
        and (zeros is None or _fits_words(zeros))
    )


def _fits_words(values: Tensor) -> bool:
    offset, size = values.storage_offset(), values.numel()
    return offset * values.itemsize % 4 == 0 and size * values.itemsize % 4 == 0


def _in_words(values: Tensor) -> Tensor:
    return values.view(-1).view(torch.int32)


def multiply(
    x: Tensor,
    words: Tensor,
    scale: Tensor,
    zeros: Tensor | None,
    bias: Tensor | None,
    group: int,
    tile: Int4Tile | None = None,
) -> Tensor:
    """The op linear_w4a16 where serves(x, scale, zeros). words int32 [N, K/8]; tile: None for that
    of the table.
    """
    n, k = words.shape[0], words.shape[1] * 8
    out = x.new_empty((*x.shape[:-1], n))
    if rows := num_rows(out):
        tile = tile or LINEAR_INT4_ROWS.choose(x.device, rows)
        splits = tile.splits(n, k)
        sums = out if splits == 1 else out.new_empty((splits, rows, n), dtype=torch.float32)
        sixteen = TRITON_DTYPE[x.dtype]
        _rows[(triton.cdiv(n, tile.weight_rows), triton.cdiv(rows, tile.rows), splits)](
            x.reshape(rows, -1).contiguous(),
            words,
            _in_words(scale),
            None if zeros is None else _in_words(zeros),
            bias if splits == 1 else None,
            sums,
            rows,
            n,
            K=k,
            GROUP=group,
            SIXTEEN=sixteen,
            # The interpreter does not multiply bf16.
            NUMBER=tl.float32 if triton.knobs.runtime.interpret else sixteen,
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
