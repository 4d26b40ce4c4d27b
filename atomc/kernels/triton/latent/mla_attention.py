"""Attention over a paged latent cache in Triton, with the projections of keys and values absorbed:
one kernel for any mix of sequences.

A program computes a tile of query rows against some rows of the cache, which all heads share. The
rows of a tile are so many heads for consecutive new tokens of one sequence. A row of the cache is
read once: its L + R columns are the key, the first L of them, still in shared memory, the value.

As in attention.py, the host decides by shapes only, and an fp8 cache is read as bytes. T rows of q,
S sequences, H heads.
"""

from typing import NamedTuple, Unpack

import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from atomc import ops
from atomc.graph.sizes import known_equal
from atomc.kernels.checks import no_bf16_products, too_wide, unlike, unsupported
from atomc.kernels.row_views import as_heads, with_lead
from atomc.kernels.triton.attention.attention import LOG2_E, Heads, odd_numbers, offset_type
from atomc.kernels.triton.attention.attention_tiles import MAX_SPLITS, has_room, multiprocessors
from atomc.kernels.triton.attention.combine_splits import (
    add_weighted,
    combined,
    empty_splits,
    store_attended,
)
from atomc.kernels.triton.attention.sequences import tokens_of
from atomc.kernels.triton.launch.launch import (
    dot_block,
    let_next_start,
    overlap,
    unfit,
    wait_for_last,
)
from atomc.kernels.triton.launch.tiles import LATENT_ATTENTION, LATENT_ATTENTION_CODES
from atomc.kernels.triton.rows.kv_write import (
    byte_view,
    code_numbers,
    codes_of,
    scale_of_numbers,
    uncachable,
)
from atomc.ops.attention import PagedSequences
from atomc.ops.formats import FP8
from atomc.ops.mla_attention import LatentOperands
from atomc.ops.op import Refusal
from atomc.platform import Platform

MAX_LATENT, MAX_ROTATED = 512, 128


@triton.jit
def _weigh(acc, total, peak, scores, latent, seen, unit, MASKED: constexpr):
    if MASKED:
        scores = tl.where(seen, scores, -float("inf"))
    return add_weighted(acc, total, peak, scores, latent, unit, True)


@triton.jit
def add_keys(
    acc,
    total,
    peak,
    q_latent,
    q_rope,
    latent,
    k_rope,
    seen,
    unit,
    here,
    some,
    MASKED: constexpr,
    BRANCHES: constexpr,
):
    """Update the running softmax (weighted latents, sum of weights, maximum in base 2) with some
    rows of the cache; MASKED: with those that are `seen`.

    BRANCHES  for 64 rows by two groups of four warps; `here` and `some` are true, which the
              compiler does not know
    """
    # Of two products, one after the other, Triton gives each warp 16 rows of the first: of 64 rows
    # both groups compute all scores. Out of a branch it sees no second product, and each group
    # computes half of the keys. What the branch is without would be free to move into it if it was
    # a constant, with the conversion of the layout.
    if BRANCHES:
        if here:
            scores = tl.dot(q_latent, tl.trans(latent), input_precision="ieee")
            of_rope = tl.dot(q_rope, tl.trans(k_rope), input_precision="ieee")
        else:
            scores = tl.dot(q_rope, tl.trans(k_rope), input_precision="ieee")
            of_rope = scores
        scores += of_rope
        # The next rows of the cache are requested before a branch at the end of the loop, not after
        # the last product.
        if some:
            acc, total, peak = _weigh(acc, total, peak, scores, latent, seen, unit, MASKED)
    else:
        scores = tl.dot(q_latent, tl.trans(latent), input_precision="ieee")
        scores = tl.dot(q_rope, tl.trans(k_rope), scores, input_precision="ieee")
        acc, total, peak = _weigh(acc, total, peak, scores, latent, seen, unit, MASKED)
    return acc, total, peak


class LatentCache(NamedTuple):
    """[blocks, block_size, L + R] as one argument of a kernel."""

    ptr: Tensor
    slot: int
    block: int


@triton.jit
def attend_keys(
    q,
    cache,
    table,
    chosen_ptr,
    row,
    head,
    there,
    position,
    lowest_position,
    first,
    last,
    unit,
    L: constexpr,
    R: constexpr,
    BLOCK_N: constexpr,
    BLOCK_SIZE: constexpr,
    OFFSET: constexpr,
    BRANCHES: constexpr,
    CODES: constexpr,
):
    """The weighted latents, sum of weights and maximum in base 2 of a tile, whose queries are those
    of `row` and `head` where they are `there`, over the rows of the cache from `first` to `last`,
    or over chosen rows, whose positions are at `chosen_ptr` from `first` to `last`.

    position, lowest_position  of the queries, and the lowest of them; None for chosen rows
    """
    c = tl.arange(0, dot_block(L))[None, :]
    r = tl.arange(0, dot_block(R))[None, :]
    q_at = q.ptr + (row.to(tl.int64) * q.row + head * q.head)[:, None]
    q_latent = tl.load(q_at + c, mask=there[:, None] & (c < L), other=0.0)
    q_rope = tl.load(q_at + L + r, mask=there[:, None] & (r < R), other=0.0)
    peak = tl.full([head.shape[0]], -float("inf"), tl.float32)
    total = tl.zeros([head.shape[0]], tl.float32)
    acc = tl.zeros([head.shape[0], dot_block(L)], tl.float32)
    seen_by_all = first
    if chosen_ptr is None:
        unmasked = tl.maximum(tl.minimum(last, lowest_position + 1) - first, 0)
        seen_by_all = first + unmasked // BLOCK_N * BLOCK_N
    for MASKED in tl.static_range(1 if chosen_ptr is not None else 0, 2):
        start = seen_by_all if MASKED else first
        end = last if MASKED else seen_by_all
        # In branches, two stages are what fits.
        for n in tl.range(start, end, BLOCK_N, num_stages=2 if BRANCHES else None):
            key = n + tl.arange(0, BLOCK_N)
            inside = key < end
            if chosen_ptr is not None:
                key = tl.load(chosen_ptr + key, mask=inside, other=0)
            if MASKED:
                block = tl.load(table + key // BLOCK_SIZE, mask=inside, other=0).to(OFFSET)
            else:
                block = tl.load(table + key // BLOCK_SIZE).to(OFFSET)
            at = cache.ptr + (block * cache.block + key % BLOCK_SIZE * cache.slot)[:, None]
            in_latent, in_rope = c < L, r < R
            if MASKED:
                in_latent, in_rope = inside[:, None] & in_latent, inside[:, None] & in_rope
            latent = tl.load(at + c, mask=in_latent, other=0)
            k_rope = tl.load(at + L + r, mask=in_rope, other=0)
            latent = code_numbers(latent, q_latent.dtype, CODES)
            k_rope = code_numbers(k_rope, q_latent.dtype, CODES)
            seen = inside[None, :]
            if chosen_ptr is None:
                seen = (key[None, :] <= position[:, None]) & seen
            acc, total, peak = add_keys(
                acc,
                total,
                peak,
                q_latent,
                q_rope,
                latent,
                k_rope,
                seen,
                unit,
                n < end,
                start < end,
                MASKED,
                BRANCHES,
            )
    return acc, total, peak


@triton.jit(do_not_specialize=["num_rows", "num_sequences", "table_row"])
def _attend_latent(
    q,
    cache,
    out_ptr,
    lse_ptr,
    query_start,
    seq_lens,
    block_tables,
    kv_scale,
    num_rows,
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
    BY_SEQUENCE: constexpr,
    BRANCHES: constexpr,
    CODES: constexpr,
    PDL: constexpr,
):
    """One tile, or with BY_SEQUENCE all tiles of a sequence, for TILE_HEADS of the heads, over this
    program's split of the rows of the cache that a tile sees.
    """
    BLOCK_Q: constexpr = BLOCK_M // TILE_HEADS
    wait_for_last(PDL)
    split = tl.program_id(2)
    tile = tl.program_id(0)
    if not BY_SEQUENCE:
        # The last rows of a sequence see the most keys, so they start first.
        tile = tl.num_programs(0) - 1 - tile
    s, start, end, length, first_tile, end_tile = tokens_of(
        tile, query_start, seq_lens, num_rows, num_sequences, BLOCK_Q, BY_SEQUENCE
    )

    unit *= scale_of_numbers(kv_scale, CODES)
    num_new = end - start
    table = block_tables + tl.cast(s, tl.int64) * table_row
    m = tl.arange(0, BLOCK_M)
    head = tl.program_id(1) * TILE_HEADS + m % TILE_HEADS
    c = tl.arange(0, dot_block(L))[None, :]
    for first_token in range(first_tile, end_tile, BLOCK_Q):
        token = first_token + m // TILE_HEADS
        valid = (m < BLOCK_Q * TILE_HEADS) & (token < num_new) & (head < H)
        position = length - num_new + token

        # The keys that any row sees, and this program's split of them.
        lowest_position = length - num_new + first_token
        last = length - num_new + tl.minimum(first_token + BLOCK_Q, num_new)
        if not BY_SEQUENCE:
            last = tl.where(first_token < num_new, last, 0)
        first = 0
        if lse_ptr is not None:
            chunk = tl.maximum(tl.cdiv(tl.cdiv(last, tl.num_programs(2)), 16) * 16, BLOCK_N)
            first = split * chunk
            last = tl.minimum(last, first + chunk)

        acc, total, peak = attend_keys(
            q,
            cache,
            table,
            None,
            start + token,
            head,
            valid & (first < last),
            position,
            lowest_position,
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
        row = ((start + token).to(tl.int64) * H + head) * tl.num_programs(2) + split
        store_attended(out_ptr, lse_ptr, acc, total, peak, row, c, valid, first < last, L)


class LatentTiling(NamedTuple):
    """Tiles of `rows` x `keys`, `heads` of the rows for each token, and `splits` programs for the
    keys of one tile; by_sequence as in Tiling. branches: as in add_keys.
    """

    rows: int
    keys: int
    heads: int
    splits: int
    warps: int
    stages: int
    by_sequence: bool
    branches: bool = False


def tiling(q: Tensor, num_sequences: int, longest: int, kv_cache: Tensor) -> LatentTiling:
    """The tiling for queries [T, H, any] and these shapes. `longest` is the capacity of a row of
    the block tables.
    """
    (num_rows, num_heads, _), device = q.shape, kv_cache.device
    table = LATENT_ATTENTION_CODES if kv_cache.dtype in FP8 else LATENT_ATTENTION
    by_sequence = num_rows == num_sequences
    per_sequence = triton.cdiv(num_rows, max(num_sequences, 1)) * num_heads
    tile = table.choose(device, per_sequence)
    rows, keys, stages = tile.rows, tile.keys, tile.stages
    if q.element_size() == 4 or not has_room(device):
        rows, keys, stages = 16, 16, 1
    parts = triton.cdiv(num_heads, rows)
    heads = triton.cdiv(num_heads, parts)
    tiles = num_sequences
    if not by_sequence:
        tiles = num_rows // (rows // heads) + min(num_sequences, num_rows)
    splits = min(
        tile.programs * multiprocessors(device) // max(tiles * parts, 1),
        triton.cdiv(longest, keys),
        MAX_SPLITS,
    )
    # 128 heads, 64 x 8,192 rows of the cache, H100, us: in branches 399, else 553.
    branches = (rows, tile.warps) == (64, 8)
    return LatentTiling(
        rows, keys, heads, max(splits, 1), tile.warps, stages, by_sequence, branches
    )


def launch_arguments(
    q: Tensor,
    cut: LatentTiling,
    kv_cache: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    block_tables: Tensor,
    kv_scale: Tensor | None,
    latent: int,
    scale: float,
) -> dict[str, object]:
    """What kernels over latents are compiled and launched with, for q [T, H, L + R]."""
    _, num_heads, width = q.shape
    return dict(
        q=Heads(q, *q.stride()[:2]),
        cache=LatentCache(byte_view(kv_cache), *reversed(kv_cache.stride()[:2])),
        query_start=query_start,
        seq_lens=seq_lens,
        block_tables=block_tables,
        kv_scale=kv_scale,
        num_sequences=seq_lens.shape[0],
        table_row=block_tables.stride(0),
        unit=scale * LOG2_E,
        H=num_heads,
        TILE_HEADS=cut.heads,
        L=latent,
        R=width - latent,
        BLOCK_M=cut.rows,
        BLOCK_N=cut.keys,
        BLOCK_SIZE=kv_cache.shape[1],
        OFFSET=offset_type(kv_cache),
        BRANCHES=cut.branches,
        CODES=codes_of(kv_cache)["CODES"],
        num_warps=cut.warps,
        num_stages=cut.stages,
        **overlap(q.device),
    )


def attend(q: Tensor, cut: LatentTiling, **operands: Unpack[LatentOperands]) -> Tensor:
    """mla_absorbed_attention of q [T, H, L + R] with the given tiling."""
    into, lse = empty_splits(q, operands["latent"], cut.splits)
    num_rows, num_heads, _ = q.shape
    tiles = len(operands["seq_lens"]) + 1
    tiles += 0 if cut.by_sequence else num_rows // (cut.rows // cut.heads)
    _attend_latent[(tiles, triton.cdiv(num_heads, cut.heads), cut.splits)](
        out_ptr=into,
        lse_ptr=lse,
        num_rows=num_rows,
        BY_SEQUENCE=cut.by_sequence,
        **launch_arguments(q, cut, **operands),
    )
    return into if lse is None else combined(into, lse, q.dtype)


def refuse_mla_absorbed_attention(
    platform: Platform,
    q: Tensor,
    kv_cache: Tensor,
    kv_scale: Tensor | None,
    latent: int,
    scale: float,
    chosen: Tensor | None = None,
    **sequences: Unpack[PagedSequences],
) -> Refusal | None:
    if reason := unfit(platform, q=q) or uncachable(
        platform, {"kv_scale": kv_scale}, kv_cache=kv_cache
    ):
        return reason
    if not known_equal(kv_cache.stride(-1), 1):
        return Refusal("layout", "the rows of the cache are not contiguous")
    return (
        no_bf16_products(platform, q.dtype)
        or unlike((q.dtype, *FP8), kv_cache=kv_cache)
        or odd_numbers(scale, **sequences)
        or too_wide(latent, MAX_LATENT, "latents")
        or too_wide(q.shape[-1] - latent, MAX_ROTATED, "rotated keys")
        or unsupported("a kernel for all keys", chosen=chosen)
    )


@ops.mla_absorbed_attention.kernel(
    "triton",
    layout="paged",
    refuses=refuse_mla_absorbed_attention,
    tuned_for=LATENT_ATTENTION.archs,
)
def mla_absorbed_attention(q: Tensor, **operands: Unpack[LatentOperands]) -> Tensor:
    rows, kv_cache, block_tables = as_heads(q), operands["kv_cache"], operands["block_tables"]
    out = rows.new_empty((0, operands["latent"]))
    if rows.shape[0]:
        longest = block_tables.shape[1] * kv_cache.shape[1]
        cut = tiling(rows, operands["seq_lens"].shape[0], longest, kv_cache)
        out = attend(rows, cut, **operands)
    return with_lead(out, q)
