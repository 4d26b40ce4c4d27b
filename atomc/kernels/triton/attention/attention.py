"""Attention over a paged cache in Triton: one kernel for any mix of sequences.

A program computes a tile of query rows against some keys of one key/value head. The rows of a tile
are the G query heads that share this head, for consecutive new tokens of one sequence, so that each
key is read once for all of them.

The host decides by shapes only, so that a step can be captured in a CUDA graph and replayed with
other lengths. An fp8 cache is read as bytes; the scale of keys is applied to the scores, the scale
of values to the result. T rows of q, S sequences, N query heads, K key/value heads, G = N /
K, D head width.
"""

import math
from typing import NamedTuple, Unpack

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from atomc import ops
from atomc.graph.sizes import known_equal
from atomc.kernels.checks import no_bf16_products, too_wide, unlike
from atomc.kernels.row_views import as_heads, with_lead
from atomc.kernels.triton.attention.attention_tiles import Tiling, fitted_tiling, tiling
from atomc.kernels.triton.attention.combine_splits import (
    add_weighted,
    combined,
    empty_splits,
    store_attended,
)
from atomc.kernels.triton.attention.sequences import tokens_of
from atomc.kernels.triton.launch.launch import (
    dot_block,
    dot_size,
    let_next_start,
    overlap,
    unfit,
    wait_for_last,
)
from atomc.kernels.triton.launch.tiles import PAGED_DECODE
from atomc.kernels.triton.rows.kv_write import (
    byte_view,
    code_numbers,
    codes_of,
    scale_of_numbers,
    uncachable,
)
from atomc.ops.attention import PagedOperands, PagedSequences
from atomc.ops.formats import FP8
from atomc.ops.op import Refusal
from atomc.platform import Platform

MAX_WIDTH, MAX_GROUP = 256, 128
LOG2_E = math.log2(math.e)
BASE_2 = constexpr(LOG2_E)


class Heads(NamedTuple):
    """[T, N, D] as one argument of a kernel."""

    ptr: Tensor
    row: int
    head: int


class PagedHeads(NamedTuple):
    """[blocks, block_size, K, D] as one argument of a kernel."""

    # In this order; decode of 128 columns has 78 registers, and 96 with the strides reversed.
    ptr: Tensor
    head: int
    slot: int
    block: int


def paged_heads(x: Tensor) -> PagedHeads:
    return PagedHeads(byte_view(x), *reversed(x.stride()[:3]))


@triton.jit
def _of_head(cache, head):
    return PagedHeads(cache.ptr + head * cache.head, cache.head, cache.slot, cache.block)


@triton.jit
def _walk(
    acc,
    total,
    peak,
    q,
    q_rest,
    table,
    k,
    rest,
    v,
    first,
    last,
    position,
    inner,
    unit,
    D: constexpr,
    REST: constexpr,
    DV: constexpr,
    BLOCK_N: constexpr,
    BLOCK_SIZE: constexpr,
    OFFSET: constexpr,
    WINDOW: constexpr,
    SOFTCAP: constexpr,
    SPLIT: constexpr,
    MASKED: constexpr,
    CODES: constexpr,
):
    """Update the running softmax (weighted values, sum of weights, maximum in base 2) with the keys
    from `first` to `last`.

    Without MASKED, each row sees all of these keys, and their number is a multiple of BLOCK_N.
    BLOCK_SIZE: None where all keys of a sequence are in its first block.
    """
    d = tl.arange(0, q.shape[1])
    dv = tl.arange(0, acc.shape[1])
    if BLOCK_SIZE is None:
        block = tl.load(table, mask=first < last, other=0).to(OFFSET)
    for n in range(first, last, BLOCK_N):
        key = n + tl.arange(0, BLOCK_N)
        if BLOCK_SIZE is None:
            slot = key
        elif MASKED:
            block = tl.load(table + key // BLOCK_SIZE, mask=key < last, other=0).to(OFFSET)
            slot = key % BLOCK_SIZE
        else:
            block = tl.load(table + key // BLOCK_SIZE).to(OFFSET)
            slot = key % BLOCK_SIZE
        k_at = k.ptr + ((block * k.block + slot * k.slot)[:, None] + d[None, :])
        v_at = v.ptr + ((block * v.block + slot * v.slot)[:, None] + dv[None, :])
        if MASKED or q.shape[1] > D:
            keys = tl.load(k_at, mask=(key < last)[:, None] & (d < D)[None, :], other=0)
        else:
            keys = tl.load(k_at)
        if MASKED or acc.shape[1] != DV:
            values = tl.load(v_at, mask=(key < last)[:, None] & (dv < DV)[None, :], other=0)
        else:
            values = tl.load(v_at)
        keys = code_numbers(keys, q.dtype, CODES)
        values = code_numbers(values, q.dtype, CODES)

        scores = tl.dot(q, tl.trans(keys), input_precision="ieee")
        if REST:
            r = tl.arange(0, q_rest.shape[1])
            r_at = rest.ptr + ((block * rest.block + slot * rest.slot)[:, None] + r[None, :])
            if MASKED or q_rest.shape[1] > REST:
                k_rest = tl.load(r_at, mask=(key < last)[:, None] & (r < REST)[None, :], other=0)
            else:
                k_rest = tl.load(r_at)
            k_rest = code_numbers(k_rest, q.dtype, CODES)
            scores = tl.dot(q_rest, tl.trans(k_rest), scores, input_precision="ieee")
        if SOFTCAP:
            # cap * tanh(scores / cap), by a sigmoid, which does not overflow.
            scores = 2.0 * tl.sigmoid(scores * inner) - 1.0
        if MASKED:
            seen = key[None, :] <= position[:, None]
            if SPLIT:
                seen = seen & (key < last)[None, :]
            if WINDOW:
                seen = seen & (key[None, :] > position[:, None] - WINDOW)
            scores = tl.where(seen, scores, -float("inf"))
        acc, total, peak = add_weighted(
            acc, total, peak, scores, values, unit, SPLIT or WINDOW != 0
        )
    return acc, total, peak


@triton.jit(do_not_specialize=["num_rows", "num_sequences", "table_row"])
def _attend(
    q,
    k,
    rest,
    v,
    out_ptr,
    lse_ptr,
    query_start,
    seq_lens,
    block_tables,
    sinks,
    k_scale,
    v_scale,
    num_rows,
    num_sequences,
    table_row,
    inner,
    unit,
    N: constexpr,
    GROUP: constexpr,
    D: constexpr,
    REST: constexpr,
    DV: constexpr,
    BLOCK_M: constexpr,
    BLOCK_N: constexpr,
    BLOCK_SIZE: constexpr,
    OFFSET: constexpr,
    WINDOW: constexpr,
    SOFTCAP: constexpr,
    BY_SEQUENCE: constexpr,
    CAUSAL: constexpr,
    CODES: constexpr,
    PDL: constexpr,
):
    """One tile, or with BY_SEQUENCE all tiles of a sequence, over this program's split of the keys
    that a tile sees. REST: how many columns of q and k are multiplied after the first D.
    """
    BLOCK_Q: constexpr = BLOCK_M // GROUP
    SPLIT: constexpr = lse_ptr is not None
    FIRST: constexpr = 1 if BY_SEQUENCE or WINDOW else 0
    wait_for_last(PDL)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    tile = tl.program_id(0)
    if not BY_SEQUENCE:
        # The last rows of a sequence see the most keys, so they start first.
        tile = tl.num_programs(0) - 1 - tile
        if num_sequences == 1:
            # Heads vary fastest, so that the longest tiles do not share a multiprocessor. H200,
            # heads of 128: 1 x 1,024 tokens, 32 heads 32 us (43 otherwise); 1 x 8,192, 16 heads
            # 597 (669). But 63 decodes and a chunk of 512, where computing overlaps reading: 93
            # (81).
            program = tl.program_id(0) + tl.num_programs(0) * kv_head
            tile = tl.num_programs(0) - 1 - program // tl.num_programs(1)
            kv_head = program % tl.num_programs(1)
    s, start, end, length, first_tile, end_tile = tokens_of(
        tile, query_start, seq_lens, num_rows, num_sequences, BLOCK_Q, BY_SEQUENCE
    )
    if not BY_SEQUENCE:  # noqa: SIM102  only one of them is known to the compiler
        if first_tile >= end - start:
            return

    if SOFTCAP:
        inner *= scale_of_numbers(k_scale, CODES)
    else:
        unit *= scale_of_numbers(k_scale, CODES)
    num_new = end - start
    table = block_tables + tl.cast(s, tl.int64) * table_row
    k, rest, v = _of_head(k, kv_head), _of_head(rest, kv_head), _of_head(v, kv_head)
    m = tl.arange(0, BLOCK_M)
    head = kv_head * GROUP + m % GROUP
    d = tl.arange(0, dot_block(D))
    dv = tl.arange(0, dot_block(DV))[None, :]
    for first_token in range(first_tile, end_tile, BLOCK_Q):
        token = first_token + m // GROUP
        valid = (m < BLOCK_Q * GROUP) & (token < num_new)
        position = length - num_new + token

        # The keys that any row sees, and this program's split of them.
        lowest_position = length - num_new + first_token
        first = 0
        if WINDOW:
            first = tl.maximum(lowest_position - WINDOW + 1, 0)
        last = length - num_new + tl.minimum(first_token + BLOCK_Q, num_new)
        if not CAUSAL:  # each row sees the keys that the last one sees
            lowest_position = length - 1
            position = tl.full([BLOCK_M], 0, tl.int32) + lowest_position
            last = length
        if SPLIT:
            chunk = tl.maximum(tl.cdiv(tl.cdiv(last - first, tl.num_programs(2)), 16) * 16, BLOCK_N)
            first += split * chunk
            last = tl.minimum(last, first + chunk)

        q_at = q.ptr + ((start + token).to(tl.int64) * q.row + head * q.head)[:, None]
        queries = tl.load(q_at + d[None, :], mask=valid[:, None] & (d < D)[None, :], other=0.0)
        q_rest = queries
        if REST:
            r = tl.arange(0, dot_block(REST))[None, :]
            q_rest = tl.load(q_at + D + r, mask=valid[:, None] & (r < REST), other=0.0)
        peak = tl.full([BLOCK_M], -float("inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        if sinks is not None and split == 0:
            # A sink is a key without value; only the first split counts it.
            peak = tl.load(sinks + head, mask=valid, other=0.0).to(tl.float32) * BASE_2
            total += 1.0
        acc = tl.zeros([BLOCK_M, dot_block(DV)], tl.float32)
        end_unmasked = first
        if FIRST == 0:
            # All rows of a wide tile see most of its keys.
            unmasked = tl.maximum(tl.minimum(last, lowest_position + 1) - first, 0)
            end_unmasked += unmasked // BLOCK_N * BLOCK_N
        for MASKED in tl.static_range(FIRST, 2):
            acc, total, peak = _walk(
                acc,
                total,
                peak,
                queries,
                q_rest,
                table,
                k,
                rest,
                v,
                end_unmasked if MASKED else first,
                last if MASKED else end_unmasked,
                position,
                inner,
                unit,
                D,
                REST,
                DV,
                BLOCK_N,
                BLOCK_SIZE,
                OFFSET,
                WINDOW,
                SOFTCAP,
                SPLIT,
                MASKED,
                CODES,
            )

        # Launched earlier, `combined` takes room from running programs. H200, 8 x 1,024
        # keys, 8 splits: 18.3 us; here 14.4.
        let_next_start(PDL)
        # A row that sees no key has the result 0, and the peak -inf.
        total = tl.where(total == 0.0, 1.0, total)
        acc = acc / total[:, None] * scale_of_numbers(v_scale, CODES)
        row = ((start + token).to(tl.int64) * N + head) * tl.num_programs(2) + split
        store_attended(out_ptr, lse_ptr, acc, total, peak, row, dv, valid, first < last, DV)


def attend(
    q: Tensor,
    cut: Tiling,
    k_cache: Tensor,
    v_cache: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    block_tables: Tensor,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    packed: bool = False,
    causal: bool = True,
    k_rest: Tensor | None = None,
    lse: Tensor | None = None,
) -> Tensor:
    """paged_attention of q [T, N, D] with the given tiling.

    packed  all keys of a sequence are in its first block
    k_rest  the last columns of keys, where these are not in k_cache; it has its dtype
    lse     [T, N] in fp32, of one split: gets the logarithms in base 2 of the softmax masses
    """
    into, of_splits = empty_splits(q, v_cache.shape[-1], cut.splits)
    lse = of_splits if lse is None else lse
    num_rows, num_heads, width = q.shape
    if k_rest is None:
        first, _ = split_width(width)
        k_cache, k_rest = k_cache[..., :first], k_cache[..., first:]
    kv_heads, num_sequences = v_cache.shape[-2], seq_lens.shape[0]
    group = num_heads // kv_heads
    tiles = num_sequences + 1 + (0 if cut.by_sequence else num_rows // (cut.rows // group))
    _attend[(tiles, kv_heads, cut.splits)](
        Heads(q, *q.stride()[:2]),
        *map(paged_heads, (k_cache, k_rest, v_cache)),
        into,
        lse,
        query_start,
        seq_lens,
        block_tables,
        sinks,
        k_scale,
        v_scale,
        num_rows,
        num_sequences,
        block_tables.stride(0),
        *score_factors(scale, softcap),
        N=num_heads,
        GROUP=group,
        BLOCK_SIZE=None if packed else v_cache.shape[1],
        OFFSET=offset_type(k_cache, k_rest, v_cache),
        WINDOW=window,
        SOFTCAP=softcap != 0.0,
        CAUSAL=causal,
        CODES=codes_of(k_cache)["CODES"],
        **_tile_arguments(cut, width, k_rest.shape[-1], v_cache.shape[-1]),
        **overlap(q.device),
    )
    return into if of_splits is None else combined(into, of_splits, q.dtype)


def attend_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_start: Tensor,
    scale: float,
    cut: Tiling,
    *,
    causal: bool,
    k_rest: Tensor | None = None,
    lse: Tensor | None = None,
) -> Tensor:
    """`attend` over the keys and values [T, K, ...] of the rows of q, for sequences without others;
    cut has one split.
    """
    return attend(
        q,
        cut,
        _one_block_cache(k),
        _one_block_cache(v),
        query_start,
        query_start.diff(),
        query_start[:-1, None],
        scale=scale,
        packed=True,
        causal=causal,
        k_rest=None if k_rest is None else _one_block_cache(k_rest),
        lse=lse,
    )


def _one_block_cache(x: Tensor) -> Tensor:
    """A cache in which a sequence's block starts at its first row of x, and has room for all."""
    return x.as_strided((x.shape[0], 1, *x.shape[1:]), (x.stride(0), *x.stride()))


def score_factors(scale: float, softcap: float) -> tuple[float, float]:
    """What products of q and k are multiplied by before and after the soft cap, in base 2."""
    return 2 * scale / softcap if softcap else 1.0, (softcap or scale) * LOG2_E


def _tile_arguments(cut: Tiling, width: int, rest: int, value_width: int) -> dict[str, int | bool]:
    """The launch arguments of a tiling, for heads of so many columns."""
    limit = {} if cut.registers is None else {"maxnreg": cut.registers}
    return dict(
        D=width - rest,
        REST=rest,
        DV=value_width,
        BLOCK_M=cut.rows,
        BLOCK_N=cut.keys,
        BY_SEQUENCE=cut.by_sequence,
        num_warps=cut.warps,
        num_stages=cut.stages,
        **limit,
    )


def split_width(width: int) -> tuple[int, int]:
    """How many columns of q and k a program multiplies first, and after them: of 192, 128 and 64.
    All at once, where two powers of two are not less than the next one.
    """
    half = triton.next_power_of_2(width) // 2
    if half + dot_size(width - half) < 2 * half:
        return half, width - half
    return width, 0


def offset_type(*caches: Tensor) -> tl.dtype:
    """The type of the offsets of elements."""
    distances = (
        sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
        for x in caches
    )
    return tl.int32 if max(distances) < 2**31 else tl.int64


def odd_numbers(scale: float, **sequences: Tensor) -> Refusal | None:
    """Refuse descriptions of sequences that are not contiguous int32, or a scale that the kernels
    cannot use.
    """
    for name, numbers in sequences.items():
        if numbers.dtype != torch.int32 or not known_equal(numbers.stride(-1), 1):
            return Refusal("dtype", f"{name} is not a contiguous int32 tensor")
    if scale <= 0:
        return Refusal("argument", f"the scale {scale} is not positive")
    return None


def crowded_group(group: int) -> Refusal | None:
    """Refuse more query heads for a key/value head than a tile has rows."""
    if group <= MAX_GROUP:
        return None
    return Refusal("shape", f"{group} query heads share a key/value head, the limit is {MAX_GROUP}")


def refuse_paged_attention(
    platform: Platform,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    scale: float,
    **sequences: Unpack[PagedSequences],
) -> Refusal | None:
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    return (
        unfit(platform, q=q)
        or uncachable(platform, scales, k_cache=k_cache, v_cache=v_cache)
        or no_bf16_products(platform, q.dtype)
        or unlike((q.dtype, *FP8), k_cache=k_cache)
        or odd_numbers(scale, **sequences)
        or too_wide(max(k_cache.shape[-1], v_cache.shape[-1]), MAX_WIDTH, "heads")
        or crowded_group(q.shape[-2] // k_cache.shape[-2])
    )


@ops.paged_attention.kernel(
    "triton", layout="paged", refuses=refuse_paged_attention, tuned_for=PAGED_DECODE.archs
)
def paged_attention(q: Tensor, **operands: Unpack[PagedOperands]) -> Tensor:
    rows, k_cache, v_cache = as_heads(q), operands["k_cache"], operands["v_cache"]
    if rows.shape[0] == 0:
        return q.new_empty((*q.shape[:-1], v_cache.shape[-1]))
    block_size, kv_heads = k_cache.shape[1:3]
    cut = tiling(
        rows.shape[0],
        operands["seq_lens"].shape[0],
        rows.shape[1] // kv_heads,
        kv_heads,
        max(rows.shape[2], v_cache.shape[-1]),
        q.element_size(),
        operands["block_tables"].shape[1] * block_size,
        q.device,
    )
    cut = fitted_tiling(cut, rows.shape[2], q.device)
    return with_lead(attend(rows, cut, **operands), q)
