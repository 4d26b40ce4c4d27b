"""The indexer of sparse attention in Triton (DeepSeek-V3.2): the write of its keys, the scores of
cached keys, and the choice of the best.

Scores are kept in fp32 in memory, [rows, capacity of a sequence], for as many rows at a time as fit
SCORE_BYTES. The choice is a radix select: four passes over the scores of a row find the eight next
bits of the last chosen one, by the number of keys with each value of these bits; one more writes
the positions of all that are chosen. Rows with at most topk keys choose all, without scores.

The host decides by shapes only. T rows, J heads, C width of a key.
"""

from typing import Unpack

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from atomc import ops
from atomc.kernels.checks import (
    first_refusal,
    named,
    no_bf16_products,
    scattered_slots,
    too_wide,
    unlike,
)
from atomc.kernels.triton.attention.attention import odd_numbers, offset_type
from atomc.kernels.triton.attention.attention_tiles import multiprocessors
from atomc.kernels.triton.latent.mla_chosen import sequence_of_row
from atomc.kernels.triton.launch.launch import begin, dot_block, overlap, unfit
from atomc.kernels.triton.rows.kv_write import byte_view, code_numbers, codes_of, uncachable
from atomc.kernels.triton.rows.quant import amax_scale, fp8_codes
from atomc.ops.attention import PagedSequences
from atomc.ops.formats import FP8
from atomc.ops.indexer import SCALE_BYTES
from atomc.ops.op import Refusal
from atomc.platform import Platform

MAX_HEADS, MAX_WIDTH = 128, 256
SCORE_BYTES = 256 * 2**20
KEYS, PROGRAMS = constexpr(64), 4  # of a tile of scores; per multiprocessor. Not measured
# Scores of a tile of a choice. H200, 2,048 of 32,000 scores, 1 or 64 rows, 8 warps: 153 us with
# 1,024, 143 with 2,048, 113 with 4,096; with 16 warps 119 with 8,192.
RANKED = constexpr(4096)
ROWS = constexpr(4)  # of a program that writes keys


@triton.jit
def _index_write(
    k_ptr,
    cache_ptr,
    scales_ptr,
    slots_ptr,
    rows,
    k_row,
    c_slot,
    s_slot,
    C: constexpr,
    CODES: constexpr,
    BY_BITS: constexpr,
    PDL: constexpr,
):
    begin(PDL)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    c = tl.arange(0, triton.next_power_of_2(C))[None, :]
    slot = tl.load(slots_ptr + row, row < rows, -1)
    there = (slot >= 0) & (c < C)
    key = tl.load(k_ptr + row.to(tl.int64) * k_row + c, there, 0.0)
    to = cache_ptr + slot * c_slot + c
    if CODES == "":
        tl.store(to, key.to(cache_ptr.dtype.element_ty), there)
    else:
        LARGEST: constexpr = 240.0 if CODES == "fnuz" else 448.0
        key = key.to(tl.float32)
        scale = amax_scale(key, 1, LARGEST)[:, None]
        tl.store(to, fp8_codes(key * tl.div_rn(1.0, scale), CODES == "fnuz", BY_BITS), there)
        tl.store(scales_ptr + slot * s_slot, scale, slot >= 0)


@triton.jit(do_not_specialize=["first_row", "num_sequences", "table_row", "scores_row"])
def _index_scores(
    q_ptr,
    weights_ptr,
    cache_ptr,
    scales_ptr,
    scores_ptr,
    query_start,
    seq_lens,
    block_tables,
    first_row,
    num_sequences,
    table_row,
    scores_row,
    q_row,
    q_head,
    w_row,
    c_block,
    c_slot,
    s_block,
    s_slot,
    topk,
    J: constexpr,
    C: constexpr,
    BLOCK_SIZE: constexpr,
    OFFSET: constexpr,
    CODES: constexpr,
    PDL: constexpr,
):
    """The scores of every num_programs(1)-th tile of the keys that a row sees."""
    begin(PDL)
    at_row = tl.program_id(0)
    s, position = sequence_of_row(first_row + at_row, query_start, seq_lens, num_sequences)
    row = (first_row + at_row).to(tl.int64)
    if position >= topk:
        j = tl.arange(0, dot_block(J))
        c = tl.arange(0, dot_block(C))
        q_at = q_ptr + row * q_row + (j * q_head)[None, :] + c[:, None]
        q = tl.load(q_at, (j < J)[None, :] & (c < C)[:, None], 0.0)  # [C, J]
        weights = tl.load(weights_ptr + row * w_row + j, j < J, 0.0).to(tl.float32)
        if CODES != "":
            weights *= 128.0 if CODES == "fnuz" else 256.0
        table = block_tables + tl.cast(s, tl.int64) * table_row
        into = scores_ptr + at_row.to(tl.int64) * scores_row
        step = tl.num_programs(1) * KEYS
        for n in range(tl.program_id(1) * KEYS, position + 1, step):
            key = n + tl.arange(0, KEYS)
            there = key <= position
            block = tl.load(table + key // BLOCK_SIZE, there, 0).to(OFFSET)
            at = block * c_block + key % BLOCK_SIZE * c_slot
            cached = tl.load(cache_ptr + at[:, None] + c, there[:, None] & (c < C)[None, :], 0)
            products = tl.dot(code_numbers(cached, q.dtype, CODES), q, input_precision="ieee")
            score = tl.sum(tl.maximum(products, 0.0) * weights[None, :], 1)
            if CODES != "":
                score *= tl.load(scales_ptr + block * s_block + key % BLOCK_SIZE * s_slot, there, 0)
            tl.store(into + key, score, there)


@triton.jit
def _ordered(score):
    """The bits of scores as unsigned integers in the same order. -0.0 is before 0.0; all zeros of
    a row have one sign, that of weights that are all negative or not.
    """
    bits = score.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) | -0x80000000)).to(tl.uint32, bitcast=True)


@triton.jit(do_not_specialize=["first_row", "num_sequences", "scores_row"])
def _choose(
    scores_ptr,
    out_ptr,
    query_start,
    seq_lens,
    first_row,
    num_sequences,
    scores_row,
    TOPK: constexpr,
    PDL: constexpr,
):
    """The positions of the TOPK largest scores of one row; of equal ones the first."""
    begin(PDL)
    at_row = tl.program_id(0)
    _, position = sequence_of_row(first_row + at_row, query_start, seq_lens, num_sequences)
    out = out_ptr + (first_row + at_row).to(tl.int64) * TOPK
    if position < TOPK:
        number = tl.arange(0, triton.next_power_of_2(TOPK))
        tl.store(out + number, tl.where(number <= position, number, -1), number < TOPK)
    else:
        scores = scores_ptr + at_row.to(tl.int64) * scores_row
        value = tl.arange(0, 256)
        # The bits that are known of the last chosen score, and how many scores with these bits are
        # chosen.
        known = tl.full((), 0, tl.uint32)
        left = tl.full((), TOPK, tl.int32)
        for digit in range(4):
            shift = 24 - 8 * digit
            counts = tl.zeros([256], tl.int32)
            for n in range(0, position + 1, RANKED):
                key = n + tl.arange(0, RANKED)
                bits = _ordered(tl.load(scores + key, key <= position, 0.0))
                # In two steps: a shift by all 32 bits is undefined.
                alike = (bits >> shift >> 8) == (known >> shift >> 8)
                counts += tl.histogram(
                    ((bits >> shift) & 255).to(tl.int32), 256, mask=alike & (key <= position)
                )
            above = tl.sum(counts) - tl.cumsum(counts, 0)
            here = (above < left) & (left <= above + counts)
            left -= tl.sum(tl.where(here, above, 0))
            known |= (tl.sum(tl.where(here, value, 0)) << shift).to(tl.uint32)
        written, equal = 0, 0
        for n in range(0, position + 1, RANKED):
            key = n + tl.arange(0, RANKED)
            bits = _ordered(tl.load(scores + key, key <= position, 0.0))
            last = ((bits == known) & (key <= position)).to(tl.int32)
            rank = equal + tl.cumsum(last, 0)
            above = (bits > known) & (key <= position)
            taken = (above | ((last > 0) & (rank <= left))).to(tl.int32)
            place = written + tl.cumsum(taken, 0) - 1
            tl.store(out + place, key, taken > 0)
            written += tl.sum(taken)
            equal += tl.sum(last)


def _width(index_cache: Tensor) -> int:
    """The columns of a key in a row of the cache."""
    return index_cache.shape[-1] - (SCALE_BYTES if index_cache.dtype in FP8 else 0)


def _scales(index_cache: Tensor) -> Tensor | None:
    """The scales [blocks, block_size] of an fp8 cache."""
    if index_cache.dtype not in FP8:
        return None
    return index_cache.view(torch.float32)[..., -1]


def _unreadable(platform: Platform, index_cache: Tensor) -> Refusal | None:
    return uncachable(platform, {}, index_cache=index_cache)


def _scattered(index_cache: Tensor) -> Refusal | None:
    if index_cache.is_contiguous():
        return None
    return Refusal("layout", "the cache is not contiguous")


refuse_index_write = first_refusal(
    named("platform k", unfit),
    _unreadable,
    lambda k: too_wide(k.shape[-1], MAX_WIDTH, "keys"),
    scattered_slots,
    _scattered,
)


@ops.index_write.kernel("triton", layout="paged", refuses=refuse_index_write)
def index_write(k: Tensor, index_cache: Tensor, slots: Tensor) -> Tensor:
    rows = k.reshape(-1, k.shape[-1])
    if len(rows):
        scales = _scales(index_cache)
        _index_write[(triton.cdiv(len(rows), ROWS.value),)](
            rows,
            byte_view(index_cache),
            scales,
            slots,
            len(rows),
            rows.stride(0),
            index_cache.stride(1),
            0 if scales is None else scales.stride(1),
            C=rows.shape[1],
            num_warps=4,
            **codes_of(index_cache),
            **overlap(k.device),
        )
    return k.new_empty((0,))


refuse_paged_index_topk = first_refusal(
    named("platform q weights", unfit),
    _unreadable,
    lambda platform, q: no_bf16_products(platform, q.dtype),
    lambda q, index_cache: unlike((q.dtype, *FP8), index_cache=index_cache),
    named("query_start seq_lens block_tables", odd_numbers, 1.0),
    lambda q: too_wide(q.shape[-2], MAX_HEADS, "heads"),
    lambda q: too_wide(q.shape[-1], MAX_WIDTH, "keys"),
    _scattered,
)


@ops.paged_index_topk.kernel("triton", layout="paged", refuses=refuse_paged_index_topk)
def paged_index_topk(
    q: Tensor,
    weights: Tensor,
    index_cache: Tensor,
    topk: int,
    **sequences: Unpack[PagedSequences],
) -> Tensor:
    rows, by_row = q.reshape(-1, *q.shape[-2:]), weights.reshape(-1, weights.shape[-1])
    chosen = q.new_empty((len(rows), topk), dtype=torch.int32)
    capacity = sequences["block_tables"].shape[1] * index_cache.shape[1]
    at_once = max(1, SCORE_BYTES // (4 * capacity))
    scores = q.new_empty((min(len(rows), at_once), capacity), dtype=torch.float32)
    for first in range(0, len(rows), at_once):
        count = min(at_once, len(rows) - first)
        if capacity > topk:
            index_scores(rows, by_row, index_cache, scores[:count], first, topk, **sequences)
        choose(scores[:count], chosen, sequences["query_start"], sequences["seq_lens"], first)
    return chosen.view(*q.shape[:-2], topk)


def index_scores(
    q: Tensor,
    weights: Tensor,
    index_cache: Tensor,
    scores: Tensor,
    first: int,
    topk: int,
    query_start: Tensor,
    seq_lens: Tensor,
    block_tables: Tensor,
) -> None:
    """Write the scores [rows, capacity] of rows of q [T, J, C] from `first` on, for the keys that
    they see; of rows that see at most topk keys, none.
    """
    count, capacity = scores.shape
    programs = max(1, PROGRAMS * multiprocessors(q.device) // count)
    scales = _scales(index_cache)
    _index_scores[(count, min(programs, triton.cdiv(capacity, KEYS.value)))](
        q,
        weights,
        byte_view(index_cache),
        scales,
        scores,
        query_start,
        seq_lens,
        block_tables,
        first,
        seq_lens.shape[0],
        block_tables.stride(0),
        scores.stride(0),
        q.stride(0),
        q.stride(1),
        weights.stride(0),
        *index_cache.stride()[:2],
        *((0, 0) if scales is None else scales.stride()),
        topk,
        J=q.shape[1],
        C=_width(index_cache),
        BLOCK_SIZE=index_cache.shape[1],
        OFFSET=offset_type(index_cache),
        CODES=codes_of(index_cache)["CODES"],
        num_warps=4,
        num_stages=3,
        **overlap(q.device),
    )


def choose(
    scores: Tensor, chosen: Tensor, query_start: Tensor, seq_lens: Tensor, first: int
) -> None:
    """Write the rows of chosen [T, topk] from `first` on, by their scores [rows, capacity]."""
    topk = chosen.shape[1]
    _choose[(len(scores),)](
        scores,
        chosen,
        query_start,
        seq_lens,
        first,
        seq_lens.shape[0],
        scores.stride(0),
        TOPK=topk,
        num_warps=8,
        **overlap(scores.device),
    )
