"""Latent attention over chosen rows of a paged cache in Triton (DeepSeek-V3.2): one kernel for any
mix of sequences.

A program computes some heads of one token against some of the token's chosen rows, which it reads
through the block table. The positions of all heads are the same, so that a row is read once for a
tile of heads. T rows of q, K chosen rows of each.
"""

from typing import Unpack

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from atomc import ops
from atomc.graph.sizes import known_equal
from atomc.kernels.checks import first_refusal, unlike
from atomc.kernels.row_views import as_heads, as_rows, with_lead
from atomc.kernels.triton.attention.combine_splits import combined, empty_splits, store_attended
from atomc.kernels.triton.latent import mla_attention as dense
from atomc.kernels.triton.latent.mla_attention import (
    LatentTiling,
    attend_keys,
    launch_arguments,
    tiling,
)
from atomc.kernels.triton.launch.launch import dot_block, let_next_start, wait_for_last
from atomc.kernels.triton.launch.tiles import LATENT_ATTENTION
from atomc.kernels.triton.rows.kv_write import scale_of_numbers
from atomc.ops.mla_attention import LatentOperands
from atomc.ops.op import Refusal


@triton.jit
def sequence_of_row(row, query_start, seq_lens, num_sequences):
    """The number of the sequence of a row, and the row's position in it; -1 for a row of no
    sequence.
    """
    SEARCH: constexpr = 128
    s, after = 0, 0
    for lowest in range(0, num_sequences, SEARCH):
        each = lowest + tl.arange(0, SEARCH)
        inside = each < num_sequences
        starts = tl.load(query_start + each, mask=inside, other=0)
        ends = tl.load(query_start + each + 1, mask=inside, other=0)
        lengths = tl.load(seq_lens + each, mask=inside, other=0)
        owns = (starts <= row) & (row < ends)
        s += tl.sum(tl.where(owns, each, 0))
        after += tl.sum(tl.where(owns, lengths - (ends - row) + 1, 0))
    return s, after - 1


@triton.jit(do_not_specialize=["num_sequences", "table_row"])
def _attend_chosen(
    q,
    cache,
    chosen_ptr,
    out_ptr,
    lse_ptr,
    query_start,
    seq_lens,
    block_tables,
    kv_scale,
    num_sequences,
    table_row,
    chosen_row,
    unit,
    H: constexpr,
    TILE_HEADS: constexpr,
    L: constexpr,
    R: constexpr,
    BLOCK_M: constexpr,
    BLOCK_N: constexpr,
    K: constexpr,
    BLOCK_SIZE: constexpr,
    OFFSET: constexpr,
    BRANCHES: constexpr,
    CODES: constexpr,
    PDL: constexpr,
):
    """TILE_HEADS heads of one token over this program's split of its chosen rows."""
    wait_for_last(PDL)
    row = tl.program_id(0)
    split = tl.program_id(2)
    s, position = sequence_of_row(row, query_start, seq_lens, num_sequences)
    table = block_tables + tl.cast(s, tl.int64) * table_row
    own = chosen_ptr + row.to(tl.int64) * chosen_row

    first = 0
    last = tl.minimum(position + 1, K)
    if lse_ptr is not None:
        chunk = tl.cdiv(tl.cdiv(last, tl.num_programs(2)), BLOCK_N) * BLOCK_N
        first = split * chunk
        last = tl.minimum(last, first + chunk)

    unit *= scale_of_numbers(kv_scale, CODES)
    m = tl.arange(0, BLOCK_M)
    head = tl.program_id(1) * TILE_HEADS + m
    valid = (m < TILE_HEADS) & (head < H)
    c = tl.arange(0, dot_block(L))[None, :]
    acc, total, peak = attend_keys(
        q,
        cache,
        table,
        own,
        row,
        head,
        valid & (first < last),
        None,
        None,
        first,
        last,
        unit,
        L,
        R,
        BLOCK_N,
        BLOCK_SIZE,
        OFFSET,
        BRANCHES,
        CODES,
    )

    let_next_start(PDL)
    # A row that sees no key has the result 0, and the peak -inf.
    total = tl.where(total == 0.0, 1.0, total)
    acc = acc / total[:, None] * scale_of_numbers(kv_scale, CODES)
    out_row = (row.to(tl.int64) * H + head) * tl.num_programs(2) + split
    store_attended(out_ptr, lse_ptr, acc, total, peak, out_row, c, valid, first < last, L)


def attend_chosen(
    q: Tensor, cut: LatentTiling, chosen: Tensor, **operands: Unpack[LatentOperands]
) -> Tensor:
    """mla_absorbed_attention of q [T, H, L + R] over the rows chosen [T, K], with the given
    tiling.
    """
    num_rows, num_heads, _ = q.shape
    into, lse = empty_splits(q, operands["latent"], cut.splits)
    _attend_chosen[(num_rows, triton.cdiv(num_heads, cut.heads), cut.splits)](
        chosen_ptr=chosen,
        out_ptr=into,
        lse_ptr=lse,
        chosen_row=chosen.stride(0),
        K=chosen.shape[-1],
        **launch_arguments(q, cut, **operands),
    )
    return into if lse is None else combined(into, lse, q.dtype)


def refuse_chosen(chosen: Tensor) -> Refusal | None:
    if not known_equal(chosen.stride(-1), 1):
        return Refusal("layout", "the positions of chosen keys are not contiguous")
    return unlike((torch.int32,), chosen=chosen)


def refuse_positions(chosen: Tensor | None) -> Refusal | None:
    if chosen is None:
        return Refusal("argument", "a kernel for chosen keys")
    return refuse_chosen(chosen)


refuse_mla_absorbed_attention = first_refusal(
    refuse_positions, first_refusal(dense.refuse_mla_absorbed_attention, chosen=None)
)


@ops.mla_absorbed_attention.kernel(
    "triton",
    layout="paged",
    refuses=refuse_mla_absorbed_attention,
    tuned_for=LATENT_ATTENTION.archs,
)
def mla_absorbed_attention(
    q: Tensor, token: Tensor, chosen: Tensor, **operands: Unpack[LatentOperands]
) -> Tensor:
    kv_cache = operands["kv_cache"]
    longest = operands["block_tables"].shape[1] * kv_cache.shape[1]
    if longest <= chosen.shape[-1]:  # all keys are chosen
        return dense.mla_absorbed_attention(q, token=token, **operands)
    rows, by_row = as_heads(q), as_rows(chosen)
    out = rows.new_empty((0, operands["latent"]))
    if num_rows := rows.shape[0]:
        cut = tiling(rows, num_rows, by_row.shape[1], kv_cache)
        out = attend_chosen(rows, cut, by_row, **operands)
    return with_lead(out, q)
