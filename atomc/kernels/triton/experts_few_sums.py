"""Rows of the experts' weights times activations, summed over all columns in fp32, for weights of
each format.

A tile is [N, C, columns]: N rows of the weights of C experts, and the activations [1, C, columns]
of one row of x for each expert. The first columns of the weights are read before `wait_for_last`,
which a kernel must therefore not need for them: a caller whose ids come from the preceding kernel
waits first, and passes PDL=False.

x_row       [1, C, 1], offsets of the rows of x, which are read where `here` [1, C, 1] holds
weight_row  [N, C, 1] int64, offsets of the rows of the weights, read where `there` [N, C, 1] holds
"""

import triton
import triton.language as tl

from atomc.kernels.triton.launch import wait_for_last
from atomc.kernels.triton.unpacking import e2m1_on_top, int4_of, scale_of, zero_of
from atomc.kernels.triton.w4a16 import one_of_four


@triton.jit
def sums_of_numbers(
    x_ptr,
    x_row,
    weight_ptr,
    weight_row,
    column_step,
    here,
    there,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """fp32 [N, C] of floating-point weights, whose columns are column_step apart."""
    k = tl.arange(0, BLOCK_K)[None, None, :]
    weight_at = weight_ptr + weight_row + k * column_step
    x_at = x_ptr + x_row + k
    following = tl.load(weight_at, there & (k < K), 0.0, cache_modifier=".cg")
    wait_for_last(PDL)
    sums = tl.zeros(following.shape, tl.float32)
    for start in tl.static_range(0, K, BLOCK_K):
        weight = following
        if start + BLOCK_K < K:
            following = tl.load(
                weight_at + (start + BLOCK_K) * column_step,
                there & (k < K - start - BLOCK_K),
                0.0,
                cache_modifier=".cg",
            )
        x = tl.load(x_at + start, here & (k < K - start), 0.0)
        sums += x.to(tl.float32) * weight.to(tl.float32)
    return tl.sum(sums, 2)


@triton.jit
def sums_of_codes(
    x_ptr,
    x_row,
    x_scale_ptr,
    x_scale_row,
    x_scale_step,
    weight_ptr,
    weight_row,
    scale_ptr,
    scale_row,
    here,
    there,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """fp32 [N, C] of fp8 or int8 codes of both operands, of which a thread reads 16 at a time.

    GROUP  0: the scales, of rows, are left to the caller. Else columns of a block that shares one:
           scale_row [N, C, 1] and x_scale_row [1, C, 1] are the offsets of rows of scales
    """
    CODES: tl.constexpr = 16
    WIDE: tl.constexpr = tl.int32 if weight_ptr.dtype.element_ty == tl.int8 else tl.float32
    chunk = tl.arange(0, BLOCK_K // CODES)[None, None, :]
    k = chunk[:, :, :, None] * CODES + tl.arange(0, CODES)[None, None, None, :]
    weight_at = weight_ptr + weight_row[:, :, :, None] + k
    x_at = x_ptr + x_row[:, :, :, None] + k
    of_x, of_weight = here[:, :, :, None], there[:, :, :, None]
    following = tl.load(weight_at, of_weight & (k < K), 0.0, cache_modifier=".cg")
    wait_for_last(PDL)
    sums = tl.zeros((following.shape[0], following.shape[1], BLOCK_K // CODES), WIDE)
    for start in tl.static_range(0, K, BLOCK_K):
        weight = following
        if start + BLOCK_K < K:
            following = tl.load(
                weight_at + (start + BLOCK_K),
                of_weight & (k < K - start - BLOCK_K),
                0.0,
                cache_modifier=".cg",
            )
        x = tl.load(x_at + start, of_x & (k < K - start), 0.0)
        part = tl.sum(x.to(WIDE) * weight.to(WIDE), 3)
        if GROUP:
            group = (start + chunk * CODES) // GROUP
            inside = group * GROUP < K
            part *= tl.load(scale_ptr + scale_row + group, there & inside, 0.0)
            part *= tl.load(x_scale_ptr + x_scale_row + group * x_scale_step, here & inside, 0.0)
        sums += part
    return tl.sum(sums, 2).to(tl.float32)


@triton.jit
def _words(
    weight_ptr,
    weight_row,
    scale_ptr,
    zeros_ptr,
    scale_row,
    word,
    inside,
    GROUP: tl.constexpr,
    INT4: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    # A thread reads one word at a time, and one scale: see w4a16._row.
    words = tl.load(
        weight_ptr + tl.multiple_of(weight_row + word, (1, 1, 1)),
        inside,
        0,
        cache_modifier=".cg",
    )
    group = tl.max_contiguous(
        tl.multiple_of(scale_row + word // (GROUP // 8), (1, 1, 1)), (1, 1, BLOCK_W)
    )
    return words, scale_of(scale_ptr, group, inside, INT4), zero_of(zeros_ptr, group, inside)


@triton.jit
def sums_of_words(
    x_ptr,
    x_row,
    weight_ptr,
    weight_row,
    scale_ptr,
    zeros_ptr,
    scale_row,
    here,
    there,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    INT4: tl.constexpr,
    SIXTEEN: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """fp32 [N, C] of int4 or e2m1 codes, eight a word, with a scale (and a zero) for each GROUP of
    columns; x is of numbers.

    SIXTEEN  the type of a 16-bit x, which is read four values at a time, or None
    """
    WORDS: tl.constexpr = K // 8
    BLOCK_W: tl.constexpr = BLOCK_K // 8
    word = tl.arange(0, BLOCK_W)[None, None, :]
    following = _words(
        weight_ptr,
        weight_row,
        scale_ptr,
        zeros_ptr,
        scale_row,
        word,
        there & (word < WORDS),
        GROUP,
        INT4,
        BLOCK_W,
    )
    wait_for_last(PDL)
    sums = tl.zeros(following[0].shape, tl.float32)
    for start in tl.static_range(0, WORDS, BLOCK_W):
        words, scale, zero = following
        if start + BLOCK_W < WORDS:
            following = _words(
                weight_ptr,
                weight_row,
                scale_ptr,
                zeros_ptr,
                scale_row,
                start + BLOCK_W + word,
                there & (word < WORDS - start - BLOCK_W),
                GROUP,
                INT4,
                BLOCK_W,
            )
        inside = here & (word < WORDS - start)
        if SIXTEEN is not None:
            fours_at = x_ptr + x_row // 4 + (start + word) * 2
            low, high = tl.load(fours_at, inside, 0), tl.load(fours_at + 1, inside, 0)
        part = tl.zeros(sums.shape, tl.float32)
        for i in tl.static_range(8):
            if SIXTEEN is not None:
                x = one_of_four(low if i < 4 else high, i % 4, SIXTEEN)
            else:
                x = tl.load(x_ptr + x_row + (start + word) * 8 + i, inside, 0.0)
            if INT4:
                part += int4_of(words, i, zero) * (x * (4.0 if i % 2 else 64.0))
            else:
                part += e2m1_on_top(words << (28 - 4 * i)) * x
        sums += part * scale
    return tl.sum(sums, 2)
