"""Parts of 128 columns of 4-bit weights in the order of fragments.py: their values with scales, and
sums of products.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from atomc.kernels.triton.launch.launch import TRITON_DTYPE
from atomc.kernels.triton.w4a16.fragments import doubled, fragments, group_values, minus_zero


def packed_words(packed: Tensor) -> Tensor:
    """What packed_groups() made, for _read: integers of 32 bits where they are shorter."""
    return packed.view(-1).view(torch.int32) if packed.itemsize < 4 else packed


def packed_operands(
    words: Tensor, scale: Tensor, zeros: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """A weight as kernels take it."""
    return words, packed_words(scale), None if zeros is None else packed_words(zeros)


def number_types(dtype: torch.dtype) -> dict[str, tl.dtype]:
    """The 16-bit type of values without their scales, and that in which they are multiplied."""
    sixteen = TRITON_DTYPE[dtype]
    # The interpreter does not multiply bf16.
    return {
        "SIXTEEN": sixteen,
        "NUMBER": tl.float32 if triton.knobs.runtime.interpret else sixteen,
    }


@triton.jit
def _read(packed_ptr, at, inside, BYTES: tl.constexpr):
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
def e2m1_part(
    words,
    scale_at,
    inside,
    WARPS: tl.constexpr,
    NUMBER: tl.constexpr,
    ALONE: tl.constexpr = False,
):
    """The values [BLOCK_N, 128] of words [BLOCK_N, 4, 4] in NUMBER, without E2M1_UNIT.

    scale_at  pointers [BLOCK_N, 4], in the order in which the words are read: the four threads of a
              row read the same; `inside` [BLOCK_N, 1]: where there is a row
    """
    exponent = group_values(tl.load(scale_at, inside, 0), 32, 8)
    factor = exponent * 0x00800080  # in the exponents of two bf16
    return fragments(words, None, factor, WARPS, tl.bfloat16, NUMBER, ALONE)


@triton.jit
def _minus_zeros(words, zeros_ptr, at, inside, GROUP: tl.constexpr, SIXTEEN: tl.constexpr):
    """What is added to the codes of the words."""
    if zeros_ptr is None:
        zero = tl.full((1, 1, 1), 8.0, tl.float32)
    else:
        zero = group_values(_read(zeros_ptr, at, inside, 128 // GROUP), GROUP, 8).to(tl.float32)
    return tl.broadcast_to(minus_zero(zero, SIXTEEN), words.shape)


@triton.jit
def int4_part(
    words,
    scale_ptr,
    zeros_ptr,
    at,
    inside,
    GROUP: tl.constexpr,
    SIXTEEN: tl.constexpr,
    WARPS: tl.constexpr,
    NUMBER: tl.constexpr,
    ALONE: tl.constexpr = False,
):
    """As e2m1_part, of int4 codes, rounded to SIXTEEN.

    scale_ptr, zeros_ptr  packed_words()
    at                    where they have the part of the rows that are read [BLOCK_N, 4]
    """
    added = _minus_zeros(words, zeros_ptr, at, inside, GROUP, SIXTEEN)
    factor = doubled(group_values(_read(scale_ptr, at, inside, 128 // GROUP * 2), GROUP, 16))
    return fragments(words, added, factor, WARPS, SIXTEEN, NUMBER, ALONE)


@triton.jit
def add_e2m1(sums, x, words, scale_at, inside, WARPS: tl.constexpr, ALONE: tl.constexpr = False):
    """The sums with the products of a part: x [BLOCK_M, 128], others as in e2m1_part."""
    weight = e2m1_part(words, scale_at, inside, WARPS, x.dtype, ALONE)
    return tl.dot(weight, tl.trans(x), sums, input_precision="ieee")


@triton.jit
def add_int4(
    sums,
    x,
    words,
    scale_ptr,
    zeros_ptr,
    at,
    row_at,
    inside,
    in_rows,
    GROUP: tl.constexpr,
    SIXTEEN: tl.constexpr,
    WARPS: tl.constexpr,
    ALONE: tl.constexpr = False,
):
    """As add_e2m1, others as in int4_part. row_at, in_rows [BLOCK_N, 1]: as `at` and `inside`, of
    the rows in the order of the sums.

    Codes minus zeros are exact in 16 bits, times their scales they are not: where a part is one
    group, sums are scaled. A product for each of several groups would cost several times as much,
    as its weights would go through shared memory: there, weights are scaled.
    """
    if GROUP == 128:
        added = _minus_zeros(words, zeros_ptr, at, inside, GROUP, SIXTEEN)
        weight = fragments(words, added, None, WARPS, SIXTEEN, x.dtype, ALONE)
        product = tl.dot(weight, tl.trans(x), input_precision="ieee", out_dtype=tl.float32)
        scale = _read(scale_ptr, row_at, in_rows, 2).to(tl.int16).to(SIXTEEN, bitcast=True)
        return sums + product * scale.to(tl.float32)
    else:
        weight = int4_part(
            words, scale_ptr, zeros_ptr, at, inside, GROUP, SIXTEEN, WARPS, x.dtype, ALONE
        )
        return tl.dot(weight, tl.trans(x), sums, input_precision="ieee")
