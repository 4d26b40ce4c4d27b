"""Attention of the new tokens of a step over the rows of a latent cache from before the step, of
the sequences that have such rows.

As many programs as a GPU runs at once, and a few more, share the tiles of these sequences: a step
of prompts without cached prefixes has no tile, and takes no time. The host does not know how many
there are.
"""

from typing import Unpack

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from atomc.kernels.triton.attention.attention_tiles import multiprocessors
from atomc.kernels.triton.attention.sequences import num_tiles_with_prefix, tokens_with_prefix
from atomc.kernels.triton.latent.mla_attention import LatentTiling, attend_keys, launch_arguments
from atomc.kernels.triton.launch.launch import dot_block, let_next_start, wait_for_last
from atomc.kernels.triton.rows.kv_write import scale_of_numbers
from atomc.ops.mla_attention import LatentOperands

# Per multiprocessor: more than run at once, so that one that is late gets less to do.
PROGRAMS = 4


@triton.jit(do_not_specialize=["num_sequences", "table_row"])
def _attend_prefixes(
    q,
    cache,
    out_ptr,
    lse_ptr,
    query_start,
    seq_lens,
    block_tables,
    kv_scale,
    num_sequences,
    table_row,
    unit,
    H: constexpr,
    TILE_HEADS: constexpr,
    L: constexpr,
    R: constexpr,
    BLOCK_M: constexpr,
    BLOCK_N: constexpr,
    BLOCK_SIZE: constexpr,
    OFFSET: constexpr,
    BRANCHES: constexpr,
    CODES: constexpr,
    PDL: constexpr,
):
    """This program's part of the tiles: some new tokens of a sequence for TILE_HEADS of the heads,
    over all rows of the cache from before the step.
    """
    BLOCK_Q: constexpr = BLOCK_M // TILE_HEADS
    PARTS: constexpr = (H + TILE_HEADS - 1) // TILE_HEADS
    wait_for_last(PDL)
    unit *= scale_of_numbers(kv_scale, CODES)
    m = tl.arange(0, BLOCK_M)
    c = tl.arange(0, dot_block(L))[None, :]
    num_tiles = num_tiles_with_prefix(query_start, seq_lens, num_sequences, BLOCK_Q)
    for each in range(tl.program_id(0), num_tiles * PARTS, tl.num_programs(0)):
        s, start, end, length, first_token = tokens_with_prefix(
            each % num_tiles, query_start, seq_lens, num_sequences, BLOCK_Q
        )
        old = length - (end - start)
        head = each // num_tiles * TILE_HEADS + m % TILE_HEADS
        row = start + first_token + m // TILE_HEADS
        valid = (m < BLOCK_Q * TILE_HEADS) & (row < end) & (head < H)
        acc, total, peak = attend_keys(
            q,
            cache,
            block_tables + tl.cast(s, tl.int64) * table_row,
            None,
            row,
            head,
            valid,
            old + row - start,
            old,
            0,
            old,
            unit,
            L,
            R,
            BLOCK_N,
            BLOCK_SIZE,
            OFFSET,
            BRANCHES,
            CODES,
        )
        acc = acc / total[:, None] * scale_of_numbers(kv_scale, CODES)
        out_row = row.to(tl.int64) * H + head
        tl.store(lse_ptr + out_row, peak + tl.log2(total), mask=valid)
        out_at = out_ptr + out_row[:, None] * L + c
        tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=valid[:, None] & (c < L))
    let_next_start(PDL)


def attend_prefixes(
    q: Tensor, cut: LatentTiling, **operands: Unpack[LatentOperands]
) -> tuple[Tensor, Tensor]:
    """Attention of q [T, H, L + R] over what was cached before the step, with tiles of `cut`:
    [T, H, L], and the logarithms in base 2 of the softmax masses, [T, H] in fp32. These are -inf
    for rows of sequences without such keys, whose results are uninitialized.
    """
    num_rows, num_heads, _ = q.shape
    attended = q.new_empty((num_rows, num_heads, operands["latent"]))
    lse = q.new_full((num_rows, num_heads), -float("inf"), dtype=torch.float32)
    tiles = num_rows // (cut.rows // cut.heads) + min(num_rows, len(operands["seq_lens"]))
    tiles *= triton.cdiv(num_heads, cut.heads)
    _attend_prefixes[(min(tiles, PROGRAMS * multiprocessors(q.device)),)](
        out_ptr=attended,
        lse_ptr=lse,
        **launch_arguments(q, cut, **operands),
    )
    return attended, lse
