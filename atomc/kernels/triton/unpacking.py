"""Codes of four bits, int4 and e2m1, eight a word of 32 bits, and how a kernel unpacks them in
registers.

Code i lies at bits 4i; a group of columns shares a scale, and of int4 a zero. N rows of a weight.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from atomc.kernels.checks import FLOATS, unlike
from atomc.kernels.triton.launch import not_nvidia, scattered
from atomc.kernels.triton.mxfp4 import e8m0_values
from atomc.ops.op import Refusal
from atomc.platform import Platform

# Up to so many rows of x, unpacking a tile as often as it is read costs less than writing and
# reading 16 bits.
MAX_ROWS = 64


@triton.jit
def int4_of(words, NUMBER: tl.constexpr, zero):
    """The code of each word with this number, less its zero, times 2^-2 or, if the number is even,
    2^-6: exact, in fp32.
    """
    # Codes 2j and 2j + 1 at bits 16 and 20 of an fp32 number that is not normal, where one is a
    # unit of 2^-133 and 2^-129.
    LEFT: tl.constexpr = 16 - NUMBER // 2 * 8
    pair = words << LEFT if LEFT > 0 else words >> -LEFT
    UNIT: tl.constexpr = 0.25 if NUMBER % 2 else 0.015625
    bits = pair & (0xF00000 if NUMBER % 2 else 0xF0000)
    return tl.fma(bits.to(tl.float32, bitcast=True), 1.7014118346046923e38, zero * -UNIT)


@triton.jit
def e2m1_on_top(words):
    """The code in the highest four bits of each word, in fp32."""
    # Its exponent and mantissa lie as those of fp32, below the normal numbers for half of it; the
    # biases are 126 apart.
    bits = ((words >> 6) & 0x1C00000) | (words & -0x80000000)
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37


@triton.jit
def scale_of(scale_ptr, at, inside, INT4: tl.constexpr):
    if INT4:
        return tl.load(scale_ptr + at, inside, 0.0).to(tl.float32)
    else:
        return e8m0_values(tl.load(scale_ptr + at, inside, 0))


@triton.jit
def zero_of(zeros_ptr, at, inside):
    if zeros_ptr is None:
        return 8.0
    else:
        return tl.load(zeros_ptr + at, inside, 0).to(tl.float32)


@triton.jit
def value_of(words, NUMBER: tl.constexpr, scale, zero, INT4: tl.constexpr, TYPE: tl.constexpr):
    if INT4:
        return (int4_of(words, NUMBER, zero) * (scale * (4.0 if NUMBER % 2 else 64.0))).to(TYPE)
    else:
        return (e2m1_on_top(words << (28 - 4 * NUMBER)) * scale).to(TYPE)


@triton.jit
def unpacked(words, scale, zero, INT4: tl.constexpr, TYPE: tl.constexpr):
    """The values of eight codes a word, in three more dimensions of two; a thread that has a word
    has them all.
    """
    v04 = tl.join(
        value_of(words, 0, scale, zero, INT4, TYPE), value_of(words, 4, scale, zero, INT4, TYPE)
    )
    v15 = tl.join(
        value_of(words, 1, scale, zero, INT4, TYPE), value_of(words, 5, scale, zero, INT4, TYPE)
    )
    v26 = tl.join(
        value_of(words, 2, scale, zero, INT4, TYPE), value_of(words, 6, scale, zero, INT4, TYPE)
    )
    v37 = tl.join(
        value_of(words, 3, scale, zero, INT4, TYPE), value_of(words, 7, scale, zero, INT4, TYPE)
    )
    return tl.join(tl.join(v04, v26), tl.join(v15, v37))


def as_words(codes: Tensor) -> Tensor:
    """Codes packed in bytes, [..., 4B], as words of 32 bits, [..., B]."""
    return codes.contiguous().view(torch.int32)


def other_group(group: int) -> Refusal | None:
    return (
        None
        if group in (32, 64, 128)
        else Refusal("shape", f"groups of {group}: written for 32, 64 and 128")
    )


def unfit(
    platform: Platform, weight: Tensor, weight_scale: Tensor, bias: Tensor | None
) -> Refusal | None:
    """Why no kernel here can read this weight."""
    return (
        not_nvidia(platform)
        or unlike(FLOATS, bias=bias)
        or scattered(weight, "the weight")
        or scattered(weight_scale, "the scale of the weight")
    )
