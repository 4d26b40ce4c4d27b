"""Products of 4-bit weights in the order of fragments.py: the sums of a part of 128 columns."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from atomc.kernels.triton.fragments import doubled, fragments, minus_zero, of_groups


def in_words(packed: Tensor) -> Tensor:
    """What packed_groups() made, for _read: integers of 32 bits where they are shorter."""
    return packed.view(-1).view(torch.int32) if packed.itemsize < 4 else packed


@triton.jit
def _read(packed_ptr, at, inside, BYTES: tl.constexpr):
    """Element `at` of packed_groups(), of so many bytes. Less than four bytes are not copied while
    the products before are computed: of words of four, which in_words() has, they are.
    """
    if BYTES < 4:
        # Claims not to be contiguous, so that each of the four threads of a row reads its own.
        word = tl.load(packed_ptr + tl.multiple_of((at * BYTES) >> 2, (1, 1)), inside, 0)
        return (word >> ((at * BYTES & 3) * 8)) & (256**BYTES - 1)
    else:
        return tl.load(packed_ptr + at, inside, 0)


@triton.jit
def add_e2m1(sums, x, words, scale_at, inside, WARPS: tl.constexpr, ALONE: tl.constexpr = False):
    """The sums with the products of a part: x [BLOCK_M, 128], words [BLOCK_N, 4, 4].

    scale_at  pointers [BLOCK_N, 4], in the order in which the words are read: the four threads of a
              row read the same; `inside` [BLOCK_N, 1]: where there is a row
    """
    exponent = of_groups(tl.load(scale_at, inside, 0), 32, 8)
    factor = exponent * 0x00800080  # in the exponents of two bf16
    weight = fragments(words, None, factor, WARPS, tl.bfloat16, x.dtype, ALONE)
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
    """As add_e2m1.

    scale_ptr, zeros_ptr  in_words()
    at                    where they have the part of the rows that are read [BLOCK_N, 4]
    row_at, in_rows       likewise [BLOCK_N, 1], of the rows in the order of the sums

    Codes minus zeros are exact in 16 bits, times their scales they are not: where a part is one
    group, sums are scaled. A product for each of several groups would cost several times as much,
    as its weights would go through shared memory: there, weights are scaled.
    """
    GROUPS: tl.constexpr = 128 // GROUP
    if zeros_ptr is None:
        zero = tl.full((1, 1, 1), 8.0, tl.float32)
    else:
        zero = of_groups(_read(zeros_ptr, at, inside, GROUPS), GROUP, 8).to(tl.float32)
    added = tl.broadcast_to(minus_zero(zero, SIXTEEN), words.shape)
    if GROUP == 128:
        weight = fragments(words, added, None, WARPS, SIXTEEN, x.dtype, ALONE)
        product = tl.dot(weight, tl.trans(x), input_precision="ieee", out_dtype=tl.float32)
        scale = _read(scale_ptr, row_at, in_rows, 2).to(tl.int16).to(SIXTEEN, bitcast=True)
        return sums + product * scale.to(tl.float32)
    else:
        factor = doubled(of_groups(_read(scale_ptr, at, inside, GROUPS * 2), GROUP, 16))
        weight = fragments(words, added, factor, WARPS, SIXTEEN, x.dtype, ALONE)
        return tl.dot(weight, tl.trans(x), sums, input_precision="ieee")
