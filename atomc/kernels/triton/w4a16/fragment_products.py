"""Parts of 128 columns of 4-bit weights in the order of fragments.py: their values with scales, and
sums of products.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from atomc.kernels.triton.launch.launch import TRITON_DTYPE
from atomc.kernels.triton.w4a16.fragments import doubled, fragments, group_values, minus_zero


def packed_words(packed: Tensor) -> Tensor:
    """What packed_groups() made, for _read: integers of 32 bits where they are shorter."""
    return packed.view(-1).view(torch.int32) if packed.itemsize < 4 else packed


class FragmentWeight(NamedTuple):
    """A weight as one argument of a kernel: words, and packed_words() of their scales and zeros."""

    words: Tensor
    scale: Tensor
    zeros: Tensor | None


def fragment_weight(words: Tensor, scale: Tensor, zeros: Tensor | None) -> FragmentWeight:
    return FragmentWeight(
        words, packed_words(scale), None if zeros is None else packed_words(zeros)
    )


def number_types(dtype: torch.dtype) -> dict[str, tl.dtype]:
    """The 16-bit type of values without their scales, and that in which they are multiplied."""
    sixteen = TRITON_DTYPE[dtype]
    # The interpreter does not multiply bf16.
    return {
        "SIXTEEN": sixteen,
        "NUMBER": tl.float32 if triton.knobs.runtime.interpret else sixteen,
    }


@triton.jit
def _read(packed_ptr, at, inside, BYTES: constexpr):
    """Element `at` of packed_groups(), of so many bytes. Less than four bytes are not copied while
    the products before are computed: of words of four, which packed_words() has, they are.
    """
    if BYTES < 4:
        # Claims not to be contiguous, so that each of the four threads of a row reads its own.
        word = tl.load(packed_ptr + tl.multiple_of((at * BYTES) >> 2, (1, 1)), inside, 0)
        return (word >> ((at * BYTES & 3) * 8)) & (256**BYTES - 1)
    else:
        return tl.load(packed_ptr + at, inside, 0)


@triton.jit
def _minus_zeros(words, zeros_ptr, at, inside, GROUP: constexpr, SIXTEEN: constexpr):
    """What is added to the codes of the words."""
    if zeros_ptr is None:
        zero = tl.full((1, 1, 1), 8.0, tl.float32)
    else:
        zero = group_values(_read(zeros_ptr, at, inside, 128 // GROUP), GROUP, 8).to(tl.float32)
    return tl.broadcast_to(minus_zero(zero, SIXTEEN), words.shape)


@triton.jit
def part_values(
    words,
    weight,
    at,
    inside,
    GROUP: constexpr,
    INT4: constexpr,
    SIXTEEN: constexpr,
    WARPS: constexpr,
    NUMBER: constexpr,
    ALONE: constexpr = False,
):
    """The values [BLOCK_N, 128] of words [BLOCK_N, 4, 4] in NUMBER: of int4 codes, rounded to
    SIXTEEN, or of e2m1 codes, without E2M1_UNIT.

    at      where the FragmentWeight has the scales of this part [BLOCK_N, 4], in the order in which
            the words are read: the four threads of a row read the same
    inside  [BLOCK_N, 1]: where there is a row
    """
    if INT4:
        added = _minus_zeros(words, weight.zeros, at, inside, GROUP, SIXTEEN)
        scale = _read(weight.scale, at, inside, 128 // GROUP * 2)
        factor = doubled(group_values(scale, GROUP, 16))
        return fragments(words, added, factor, WARPS, SIXTEEN, NUMBER, ALONE)
    else:
        exponent = group_values(tl.load(weight.scale + at, inside, 0), 32, 8)
        factor = exponent * 0x00800080  # in the exponents of two bf16
        return fragments(words, None, factor, WARPS, tl.bfloat16, NUMBER, ALONE)


@triton.jit
def add_part(
    sums,
    x,
    words,
    weight,
    at,
    row_at,
    inside,
    in_rows,
    GROUP: constexpr,
    INT4: constexpr,
    SIXTEEN: constexpr,
    WARPS: constexpr,
    ALONE: constexpr = False,
):
    """The sums with the products of a part: x [BLOCK_M, 128], others as in part_values. row_at,
    in_rows [BLOCK_N, 1]: as `at` and `inside`, of the rows in the order of the sums.

    int4 codes minus zeros are exact in 16 bits, times their scales they are not: where a part is
    one group, sums are scaled. A product for each of several groups would cost several times as
    much, as its weights would go through shared memory: there, weights are scaled.
    """
    if INT4 and GROUP == 128:
        added = _minus_zeros(words, weight.zeros, at, inside, GROUP, SIXTEEN)
        values = fragments(words, added, None, WARPS, SIXTEEN, x.dtype, ALONE)
        product = tl.dot(values, tl.trans(x), input_precision="ieee", out_dtype=tl.float32)
        scale = _read(weight.scale, row_at, in_rows, 2).to(tl.int16).to(SIXTEEN, bitcast=True)
        return sums + product * scale.to(tl.float32)
    else:
        values = part_values(words, weight, at, inside, GROUP, INT4, SIXTEEN, WARPS, x.dtype, ALONE)
        return tl.dot(values, tl.trans(x), sums, input_precision="ieee")
