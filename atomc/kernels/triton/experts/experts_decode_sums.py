"""Rows of the experts' weights times activations, summed over all columns in fp32, for weights of
each format.

A tile is [N, C, columns]: N rows of the weights of C experts, and the activations [1, C, columns]
of one row of x for each expert. The first columns of the weights are read before `wait_for_last`,
which a kernel must therefore not need for them: a caller whose ids come from the preceding kernel
waits first, and passes PDL=False.

x_row       [1, C, 1], offsets of the rows of x, which are read where `here` [1, C, 1] holds
weight      the argument of experts_decode.py
weight_row  [N, C, 1] int64, offsets of the rows of the weights, read where `there` [N, C, 1] holds
"""

import triton
import triton.language as tl
from triton.language import constexpr

from atomc.kernels.triton.launch.launch import wait_for_last
from atomc.kernels.triton.w4a16.unpacking import scale_of, zero_of
from atomc.kernels.triton.w4a16.w4a16 import one_of_four

UNROLLED = constexpr(4)  # steps; of more, the loads of all would need too many registers
# Factors of x that bring products with int4 codes, which are subnormals, to units of 2^-66.
ODD, EVEN, UNIT = constexpr(2.0**63), constexpr(2.0**67), constexpr(2.0**66)
# e2m1 codes are read as subnormals, times 2^-126: half of the factor goes to x, half to the sum.
E2M1_UNIT = constexpr(2.0**63)


@triton.jit
def _add_numbers(sums, now, x_at, at, column, here, there, k, start, K, BLOCK_K):
    """The sums with these columns of the weights, and the following columns."""
    after = start + BLOCK_K
    following = tl.load(at + after * column, there & (k < K - after), 0.0, cache_modifier=".cg")
    x = tl.load(x_at + start, here & (k < K - start), 0.0)
    return sums + x.to(tl.float32) * now.to(tl.float32), following


@triton.jit
def sums_of_numbers(
    x_ptr,
    x_row,
    weight,
    weight_row,
    here,
    there,
    K: constexpr,
    BLOCK_K: constexpr,
    PDL: constexpr,
):
    """fp32 [N, C] of floating-point weights."""
    k = tl.arange(0, BLOCK_K)[None, None, :]
    at = weight.ptr + weight_row + k * weight.column
    x_at = x_ptr + x_row + k
    now = tl.load(at, there & (k < K), 0.0, cache_modifier=".cg")
    wait_for_last(PDL)
    sums = tl.zeros(now.shape, tl.float32)
    if K <= UNROLLED * BLOCK_K:
        for start in tl.static_range(0, K, BLOCK_K):
            sums, now = _add_numbers(
                sums, now, x_at, at, weight.column, here, there, k, start, K, BLOCK_K
            )
    else:
        for start in range(0, K, BLOCK_K):
            sums, now = _add_numbers(
                sums, now, x_at, at, weight.column, here, there, k, start, K, BLOCK_K
            )
    return tl.sum(sums, 2)


@triton.jit
def _int4_bits(words, NUMBER: constexpr):
    """Code NUMBER of each word in fp32, times 2^-129 (odd NUMBER) or 2^-133."""
    LEFT: constexpr = 16 - NUMBER // 2 * 8
    pair = words << LEFT if LEFT > 0 else words >> -LEFT
    return (pair & (0xF00000 if NUMBER % 2 else 0xF0000)).to(tl.float32, bitcast=True)


@triton.jit
def _e2m1_pair(words, NUMBER: constexpr):
    """Codes NUMBER, 0 to 3, and NUMBER + 4 of each word, as two bf16, times 2^-126."""
    # They are 16 bits apart. Exponent and mantissa are adjacent, as in bf16; 0.5 is a subnormal.
    LEFT: constexpr = 6 - 4 * NUMBER
    size = words << LEFT if LEFT > 0 else words >> -LEFT
    return (size & 0x01C001C0) | ((words << (12 - 4 * NUMBER)) & -0x7FFF8000)


@triton.jit
def _value(four, inside, NUMBER: constexpr, SIXTEEN: constexpr):
    """Value NUMBER, in fp32, of four 16-bit values in each int64, or behind pointers to fp32."""
    if SIXTEEN is not None:
        return one_of_four(four, NUMBER, SIXTEEN)
    else:
        return tl.load(four + NUMBER, inside, 0.0)


@triton.jit
def _words(weight, at, scale_row, there, word, WORDS, GROUP: constexpr, INT4: constexpr):
    inside = there & (word < WORDS)
    # A thread reads one word at a time, and one scale: see w4a16._row.
    words = tl.load(tl.multiple_of(at + word, (1, 1, 1)), inside, 0, cache_modifier=".cg")
    group = tl.max_contiguous(
        tl.multiple_of(scale_row + word // (GROUP // 8), (1, 1, 1)), (1, 1, word.shape[2])
    )
    scale = scale_of(weight.scale, group, inside, INT4)
    return words, scale, zero_of(weight.zeros, group, inside)


@triton.jit
def sums_of_words(
    x_ptr,
    x_row,
    weight,
    weight_row,
    scale_row,
    here,
    there,
    K: constexpr,
    GROUP: constexpr,
    INT4: constexpr,
    SIXTEEN: constexpr,
    BLOCK_K: constexpr,
    PDL: constexpr,
):
    """fp32 [N, C] of int4 or e2m1 codes, eight a word, with a scale (and a zero) for each GROUP of
    columns; x is of numbers.

    SIXTEEN  the type of a 16-bit x, which is read four values at a time, or None
    """
    WORDS: constexpr = K // 8
    BLOCK_W: constexpr = BLOCK_K // 8
    word = tl.arange(0, BLOCK_W)[None, None, :]
    at = weight.ptr + weight_row
    next_words, next_scale, next_zero = _words(
        weight, at, scale_row, there, word, WORDS, GROUP, INT4
    )
    wait_for_last(PDL)
    sums = tl.zeros(next_words.shape, tl.float32)
    for start in range(0, WORDS, BLOCK_W):
        words, scale, zero = next_words, next_scale, next_zero
        next_words, next_scale, next_zero = _words(
            weight, at, scale_row, there, start + BLOCK_W + word, WORDS, GROUP, INT4
        )
        inside = here & (start + word < WORDS)
        column = x_row + (start + word) * 8
        if SIXTEEN is not None:
            low = tl.load(x_ptr + column // 4, inside, 0)
            high = tl.load(x_ptr + column // 4 + 1, inside, 0)
        else:
            low, high = x_ptr + column, x_ptr + column + 4
        if INT4:
            # The zero is the same for all codes of a word: it is subtracted once.
            part = tl.zeros(sums.shape, tl.float32)
            whole = tl.zeros(here.shape, tl.float32)
            for i in tl.static_range(8):
                x = _value(low if i < 4 else high, inside, i % 4, SIXTEEN)
                part += _int4_bits(words, i) * (x * (ODD if i % 2 else EVEN))
                whole += x
            sums += (part * UNIT - zero * whole) * scale
        else:
            part = tl.zeros(sums.shape, tl.float32)
            for i in tl.static_range(4):
                pair = _e2m1_pair(words, i)
                first = (pair << 16).to(tl.float32, bitcast=True)
                second = (pair & -0x10000).to(tl.float32, bitcast=True)
                part += first * (_value(low, inside, i, SIXTEEN) * E2M1_UNIT)
                part += second * (_value(high, inside, i, SIXTEEN) * E2M1_UNIT)
            sums += part * E2M1_UNIT * scale
    return tl.sum(sums, 2)
