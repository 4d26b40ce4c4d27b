"""Sample tokens in Triton as atomc.runtime.sampling.inverse_transform does, in one launch without
synchronization.

A program reads one row several times: for the largest logit, the mass, the candidates of the
filters (compacted, so that the search for the smallest kept weight reads little), and the token at
which the cumulative mass exceeds the random number. Mass is an integer, so that the token does not
depend on the order of summation.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

# H200, 64 rows of 151,936 bf16 logits: see bench/results/sampler-h200.txt.
BLOCK = 4096
NUM_WARPS = 16
# The row has this many parts, whose largest weights are sorted to bound top_k.
PARTS = 1024
ONE = constexpr(0x3F800000)  # the bits of 1.0, which is the largest weight


@triton.jit
def _weights(row_ptr, at, V, top, temperature):
    """exp of the logits minus the largest, at most 1; 0 beyond the row."""
    x = tl.load(row_ptr + at, at < V, -float("inf")).to(tl.float32)
    return tl.exp((x - top) / temperature)


@triton.jit
def _mass(weights, scale):
    return (weights * scale).to(tl.int64)


@triton.jit
def _row_mass(row_ptr, V, top, temperature, least, scale, BLOCK: constexpr):
    """The mass of the weights whose bits are at least `least`."""
    lane = tl.arange(0, BLOCK)
    mass = tl.zeros([BLOCK], tl.int64)
    for start in range(0, V, BLOCK):
        weights = _weights(row_ptr, start + lane, V, top, temperature)
        mass += tl.where(weights.to(tl.int32, bitcast=True) >= least, _mass(weights, scale), 0)
    return tl.sum(mass)


@triton.jit
def _found(found_ptr, num_found, least, scale, BLOCK: constexpr):
    """The number of candidates, which are bits of weights, that are at least `least`, and their
    mass.
    """
    lane = tl.arange(0, BLOCK)
    count = tl.zeros([BLOCK], tl.int32)
    mass = tl.zeros([BLOCK], tl.int64)
    for start in range(0, num_found, BLOCK):
        bits = tl.load(found_ptr + start + lane, start + lane < num_found, 0)
        inside = (bits >= least) & (start + lane < num_found)
        count += inside.to(tl.int32)
        mass += tl.where(inside, _mass(bits.to(tl.float32, bitcast=True), scale), 0)
    return tl.sum(count), tl.sum(mass)


@triton.jit
def _largest_bound(found_ptr, num_found, low, count, mass, scale, BLOCK: constexpr):
    """The largest number, from `low` on, such that `count` candidates are at least this, or
    candidates with `mass`; the other is None.
    """
    high = tl.full([], ONE + 1, tl.int32)
    while high - low > 1:
        middle = (low + high) // 2
        count_here, mass_here = _found(found_ptr, num_found, middle, scale, BLOCK)
        enough = mass_here >= mass if count is None else count_here >= count
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    return low


@triton.jit
def _least(
    row_ptr,
    found_ptr,
    V,
    top,
    temperature,
    largest,
    top_k,
    top_p,
    scale,
    BLOCK: constexpr,
    PARTS: constexpr,
):
    """The bits of the smallest weight that top_k and then top_p keep."""
    lane = tl.arange(0, BLOCK)
    bound = tl.full([], 0, tl.int32)
    total = tl.full([], 0, tl.int64)
    if top_k >= V:
        total = _row_mass(row_ptr, V, top, temperature, 0, scale, BLOCK)
        # The sum of V weights below this is less than 1 - top_p of the total; half of that, as a
        # margin for rounding.
        negligible = (1.0 - top_p) * total.to(tl.float64) / (2.0 * V * scale)
        bound = negligible.to(tl.float32).to(tl.int32, bitcast=True)
    elif top_k <= PARTS:
        # top_k parts of the row have a weight of at least this; therefore so have the top_k
        # weights.
        parts = tl.max(tl.reshape(largest, [PARTS, BLOCK // PARTS]), 1)
        weights = tl.sort(tl.exp((parts - top) / temperature), descending=True)
        bound = tl.max(
            tl.where(tl.arange(0, PARTS) == top_k - 1, weights.to(tl.int32, bitcast=True), 0), 0
        )
    num_found = tl.full([], 0, tl.int32)
    for start in range(0, V, BLOCK):
        bits = _weights(row_ptr, start + lane, V, top, temperature).to(tl.int32, bitcast=True)
        inside = ((bits >= bound) & (start + lane < V)).to(tl.int32)
        tl.store(found_ptr + num_found + tl.cumsum(inside, 0) - 1, bits, inside > 0)
        num_found += tl.sum(inside)
    tl.debug_barrier()
    low = tl.full([], 0, tl.int32)
    if top_k < V:
        low = _largest_bound(found_ptr, num_found, low, top_k, None, scale, BLOCK)
        _, total = _found(found_ptr, num_found, low, scale, BLOCK)
    if top_p < 1.0:
        wanted = top_p * total.to(tl.float64)
        limit = wanted.to(tl.int64)
        limit = tl.minimum(limit + (limit.to(tl.float64) < wanted).to(tl.int64), total)
        low = _largest_bound(found_ptr, num_found, low, None, limit, scale, BLOCK)
    return low


@triton.jit
def _token(row_ptr, V, top, temperature, least, number, scale, BLOCK: constexpr):
    """Where the cumulative mass of the weights with bits of at least `least` exceeds `number`."""
    lane = tl.arange(0, BLOCK)
    total = _row_mass(row_ptr, V, top, temperature, least, scale, BLOCK)
    target = tl.minimum((number * total.to(tl.float64)).to(tl.int64), total - 1)
    start = tl.full([], 0, tl.int32)
    passed = tl.full([], 0, tl.int64)
    token = tl.full([], 0, tl.int32)
    while start < V:
        weights = _weights(row_ptr, start + lane, V, top, temperature)
        mass = tl.where(weights.to(tl.int32, bitcast=True) >= least, _mass(weights, scale), 0)
        inside = tl.sum(mass)
        if passed + inside > target:
            token = start + tl.sum((tl.cumsum(mass, 0) + passed <= target).to(tl.int32))
            start += V
        passed += inside
        start += BLOCK
    return tl.minimum(token, V - 1)


@triton.jit
def _inverse_transform(
    logits_ptr,
    stride,
    columns_ptr,
    found_ptr,
    tokens_ptr,
    tops_ptr,
    V,
    scale,
    FILTERED: constexpr,
    BLOCK: constexpr,
    PARTS: constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    R = tl.num_programs(0)
    row_ptr = logits_ptr + row * stride
    temperature = tl.load(columns_ptr + row).to(tl.float32)
    lane = tl.arange(0, BLOCK)

    # The largest logit of each lane, and its first position.
    largest = tl.full([BLOCK], -float("inf"), tl.float32)
    first = tl.zeros([BLOCK], tl.int32)
    nan = tl.zeros([BLOCK], tl.int32)
    for start in range(0, V, BLOCK):
        x = tl.load(row_ptr + start + lane, start + lane < V, -float("inf")).to(tl.float32)
        first = tl.where(x > largest, start + lane, first)
        largest = tl.maximum(largest, x)
        nan |= (x != x).to(tl.int32)
    top = tl.max(largest, 0)
    token = tl.min(tl.where(largest == top, first, V - 1), 0)
    top = tl.where(tl.max(nan, 0) > 0, float("nan"), top)
    tl.store(tops_ptr + row, top)
    # Without a finite largest logit there are no probabilities; the token is arbitrary.
    if (temperature > 0.0) & (tl.abs(top) < float("inf")):
        top_p = tl.load(columns_ptr + 2 * R + row)
        least = tl.load(columns_ptr + 3 * R + row).to(tl.float32).to(tl.int32, bitcast=True)
        number = tl.load(columns_ptr + 4 * R + row)
        if FILTERED:
            top_k = tl.load(columns_ptr + R + row).to(tl.int32)
            if (top_k < V) | (top_p < 1.0):
                least = tl.maximum(
                    least,
                    _least(
                        row_ptr,
                        found_ptr + row * V,
                        V,
                        top,
                        temperature,
                        largest,
                        top_k,
                        top_p,
                        scale,
                        BLOCK,
                        PARTS,
                    ),
                )
        token = _token(row_ptr, V, top, temperature, least, number, scale, BLOCK)
    tl.store(tokens_ptr + row, token.to(tl.int64))


def inverse_transform(logits: Tensor, columns: Tensor, *, filtered: bool) -> tuple[Tensor, Tensor]:
    """Token ids [R] int64 of logits [R, V], and the largest logit of each row [R] fp32, NaN if the
    row contains NaN.

    columns   [5, R] fp64: temperature (0: greedy), top_k (V: all), top_p, min_p and the random
              number in [0, 1) of each row
    filtered  some row has top_k or top_p
    """
    R, V = logits.shape
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    tokens = torch.empty(R, dtype=torch.int64, device=logits.device)
    tops = torch.empty(R, dtype=torch.float32, device=logits.device)
    # Bits of the candidates' weights.
    found = torch.empty((R, V) if filtered else (R, 0), dtype=torch.int32, device=logits.device)
    scale = 2.0 ** (62 - V.bit_length())
    _inverse_transform[(R,)](
        logits,
        logits.stride(0),
        columns,
        found,
        tokens,
        tops,
        V,
        scale,
        FILTERED=filtered,
        BLOCK=BLOCK,
        PARTS=PARTS,
        num_warps=NUM_WARPS,
    )
    return tokens, tops
