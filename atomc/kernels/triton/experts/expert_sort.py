"""Sort the pairs of a token and an expert by expert, in Triton, without waiting for the device.

T tokens, k choices of each, P = T * k pairs; pair p is choice p % k of token p // k. E experts.
Nothing adds atomically: the order does not vary from run to run, and a CUDA graph can capture it.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from atomc.kernels.triton.launch.launch import begin, overlap

SUB = constexpr(64)  # pairs that a program of the sort places at a time
# A program counts the experts of this number of pairs by itself; of more a kernel before it does.
MOST_COUNTED = 1024
# H200, us of 8,192 pairs of 256 experts in 32 / 64 / 128 chunks: 11.7 / 9.1 / 13.6; of 65,536 pairs
# in 64 / 128: 57 / 35. (`bench/moe.py --parts`)
CHUNKS = ((16384, 64), (2**63, 128))  # of up to so many pairs, each counted by one program
MAPPED = constexpr(16)  # blocks that a program of the sort describes
MOST_EXPERTS = 1024


class Routing(NamedTuple):
    """The pairs, sorted by expert, in blocks of equal length that belong to one expert each.

    block   pairs of a block
    expert  [B]: the expert of each block; of blocks that are not used, and of pairs of an unknown
            expert, a number outside 0..E-1
    order   [B * block] int32: numbers of pairs, rising in each expert; P where an expert's last
            block is not full, and in blocks that are not used. None: block p has pair p alone
    """

    block: int
    expert: Tensor
    order: Tensor | None = None


def most_blocks(pairs: int, num_experts: int, block: int) -> int:
    """The largest number of blocks into which so many pairs can be sorted."""
    return (pairs + min(pairs, num_experts) * (block - 1)) // block


@triton.jit
def _expert_of(ids_ptr, pair, P, E: constexpr):
    """The experts of pairs; E for an unknown one, and behind the last pair."""
    expert = tl.load(ids_ptr + pair, pair < P, E)
    return tl.where((expert >= 0) & (expert < E), expert, E).to(tl.int32)


@triton.jit(do_not_specialize=["P"])
def _count(
    ids_ptr,
    counts_ptr,
    P,
    E: constexpr,
    BINS: constexpr,
    CHUNK: constexpr,
    PDL: constexpr,
):
    chunk = tl.program_id(0)
    begin(PDL)
    expert = _expert_of(ids_ptr, chunk * CHUNK + tl.arange(0, CHUNK), P, E)
    tl.store(counts_ptr + chunk * BINS + tl.arange(0, BINS), tl.histogram(expert, BINS))


@triton.jit(do_not_specialize=["P", "capacity"])
def _place(
    ids_ptr,
    counts_ptr,
    order_ptr,
    expert_ptr,
    P,
    capacity,
    E: constexpr,
    BINS: constexpr,
    CHUNK: constexpr,
    SCAN: constexpr,
    BLOCK: constexpr,
    PDL: constexpr,
):
    """The first programs place a chunk of pairs each, the others describe blocks.

    BINS  a power of two; bin E counts the unknown
    """
    program = tl.program_id(0)
    chunks = tl.cdiv(P, CHUNK)
    first = program * CHUNK
    begin(PDL)
    total = tl.zeros((BINS,), tl.int32)
    before = tl.zeros((BINS,), tl.int32)  # in earlier chunks
    if counts_ptr is None:
        for start in range(0, P, SCAN):
            pair = start + tl.arange(0, SCAN)
            expert = _expert_of(ids_ptr, pair, P, E)
            total += tl.histogram(expert, BINS)
            before += tl.histogram(tl.where(pair < first, expert, E), BINS)
    else:
        for start in range(0, chunks, 16):
            chunk = start + tl.arange(0, 16)[:, None]
            counts = tl.load(
                counts_ptr + chunk * BINS + tl.arange(0, BINS)[None, :], chunk < chunks, 0
            )
            total += tl.sum(counts, 0)
            before += tl.sum(tl.where(chunk < program, counts, 0), 0)
    length = tl.where(tl.arange(0, BINS) < E, (total + BLOCK - 1) // BLOCK, 0)
    end = tl.cumsum(length, 0)
    if program < chunks:
        free = (end - length) * BLOCK + before
        index = tl.arange(0, SUB)
        for start in range(0, CHUNK, SUB):
            pair = first + start + index
            expert = _expert_of(ids_ptr, pair, P, E)
            same = (expert[:, None] == expert[None, :]) & (index[None, :] < index[:, None])
            at = tl.gather(free, expert, 0) + tl.sum(same.to(tl.int32), 1)
            tl.store(order_ptr + at, pair, expert < E)
            free += tl.histogram(expert, BINS)
    else:
        block = (program - chunks) * MAPPED + tl.arange(0, MAPPED)
        used = block < tl.max(end, 0)
        owner = tl.sum((end[None, :] <= block[:, None]).to(tl.int32), 1)
        owner = tl.where(used, owner, E)
        tl.store(expert_ptr + block, tl.where(used, owner, -1), block < capacity)
        filled = tl.gather(total, owner, 0) - (block - tl.gather(end - length, owner, 0)) * BLOCK
        inside = tl.arange(0, BLOCK)[None, :]
        padding = (inside >= filled[:, None]) | (used[:, None] == 0)
        tl.store(
            order_ptr + block[:, None] * BLOCK + inside,
            tl.zeros((MAPPED, BLOCK), tl.int32) + P,
            padding & (block < capacity)[:, None],
        )


def are_apart(pairs: int, num_experts: int) -> bool:
    """Whether so few pairs have the same expert that a block for each is faster than a sort.

    H200, us with such blocks / sorted. Experts of Qwen3-30B in fp8, of which there are 128: 8 pairs
    18.3 / 20.6, 32 pairs 43.4 / 45.8, 64 pairs 75.7 / 71.4; of DeepSeek-V2-Lite in bf16, of 64: 24
    pairs 99 / 93.
    """
    return 4 * pairs <= num_experts


def pairs_per_expert(pairs: int, num_experts: int) -> int:
    """The size by which a tile is chosen: 0 where they are apart, else the mean, rounded up."""
    return 0 if are_apart(pairs, num_experts) else triton.cdiv(pairs, num_experts)


def expert_blocks(ids: Tensor, num_experts: int, block: int) -> Routing:
    """The pairs of ids [T, k] sorted by expert, or, where they are apart, one in each block."""
    if are_apart(ids.numel(), num_experts):
        return Routing(block, ids.contiguous().view(-1))
    return sort_by_expert(ids, num_experts, block)


def sort_by_expert(ids: Tensor, num_experts: int, block: int) -> Routing:
    """The pairs of ids [T, k] (int32 or int64) in blocks of a power of two; those of ids outside
    0..num_experts-1 are left out. The sizes depend on the shape of ids only.
    """
    pairs = ids.numel()
    capacity = most_blocks(pairs, num_experts, block)
    order = ids.new_empty(capacity * block, dtype=torch.int32)
    expert = ids.new_empty(capacity, dtype=torch.int32)
    if not pairs:
        return Routing(block, expert, order)
    ids = ids.contiguous()
    bins = max(32, triton.next_power_of_2(num_experts + 1))
    chunk, counts = SUB.value, None
    if pairs > MOST_COUNTED:
        chunks = next(chunks for most, chunks in CHUNKS if pairs <= most)
        chunk = max(SUB.value, triton.next_power_of_2(triton.cdiv(pairs, chunks)))
        counts = ids.new_empty((triton.cdiv(pairs, chunk), bins), dtype=torch.int32)
        _count[(len(counts),)](
            ids, counts, pairs, E=num_experts, BINS=bins, CHUNK=chunk, **overlap(ids.device)
        )
    _place[(triton.cdiv(pairs, chunk) + triton.cdiv(capacity, MAPPED.value),)](
        ids,
        counts,
        order,
        expert,
        pairs,
        capacity,
        E=num_experts,
        BINS=bins,
        CHUNK=chunk,
        SCAN=min(1024, triton.next_power_of_2(pairs)),
        BLOCK=block,
        **overlap(ids.device),
    )
    return Routing(block, expert, order)
