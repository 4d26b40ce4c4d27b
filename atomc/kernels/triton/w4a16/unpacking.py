"""Unpack int4 and e2m1 codes in registers, from words of 32 bits with eight codes each.

Code i is at bits 4i to 4i + 3. A group of columns shares a scale and, with int4, a zero. N rows of
a weight.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from atomc.kernels.checks import unlike
from atomc.kernels.triton.launch.launch import not_nvidia, scattered
from atomc.kernels.triton.w4a16.mxfp4 import e4m3_values, e8m0_values
from atomc.ops.formats import FLOATS
from atomc.ops.op import Refusal
from atomc.platform import Platform

# Up to this number of rows of x, unpacking a tile each time it is read costs less than writing and
# reading it in 16 bits.
MAX_ROWS = 64


@triton.jit
def int4_of(words, NUMBER: constexpr, zero):
    """Code NUMBER of each word minus its zero, in fp32, times 2^-2 (odd NUMBER) or 2^-6; exact."""
    # Codes 2j and 2j + 1 are moved to bits 16 and 20 of a subnormal fp32 number, whose units there
    # are 2^-133 and 2^-129.
    LEFT: constexpr = 16 - NUMBER // 2 * 8
    pair = words << LEFT if LEFT > 0 else words >> -LEFT
    UNIT: constexpr = 0.25 if NUMBER % 2 else 0.015625
    bits = pair & (0xF00000 if NUMBER % 2 else 0xF0000)
    return tl.fma(bits.to(tl.float32, bitcast=True), 1.7014118346046923e38, zero * -UNIT)


@triton.jit
def e2m1_on_top(words):
    """The code in the highest four bits of each word, in fp32."""
    # Exponent and mantissa are adjacent, as in fp32; 0.5 is a subnormal there. The biases differ by
    # 126.
    bits = ((words >> 6) & 0x1C00000) | (words & -0x80000000)
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37


@triton.jit
def scale_of(scale_ptr, at, inside, INT4: constexpr):
    """The scales in fp32: floats of int4, else the bits of e4m3 in int8 or of e8m0 in uint8."""
    if INT4:
        return tl.load(scale_ptr + at, inside, 0.0).to(tl.float32)
    elif scale_ptr.dtype.element_ty == tl.int8:
        return e4m3_values(tl.load(scale_ptr + at, inside, 0))
    else:
        return e8m0_values(tl.load(scale_ptr + at, inside, 0))


@triton.jit
def zero_of(zeros_ptr, at, inside):
    if zeros_ptr is None:
        return 8.0
    else:
        return tl.load(zeros_ptr + at, inside, 0).to(tl.float32)


@triton.jit
def value_of(words, NUMBER: constexpr, scale, zero, INT4: constexpr, TYPE: constexpr):
    if INT4:
        return (int4_of(words, NUMBER, zero) * (scale * (4.0 if NUMBER % 2 else 64.0))).to(TYPE)
    else:
        return (e2m1_on_top(words << (28 - 4 * NUMBER)) * scale).to(TYPE)


@triton.jit
def unpacked(words, scale, zero, INT4: constexpr, TYPE: constexpr):
    """The values of the eight codes of each word, in three new dimensions of size two. A thread
    that has a word has all of its values.
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


def code_words(codes: Tensor) -> Tensor:
    """Codes packed in bytes, [..., 4B], as words of 32 bits, [..., B]."""
    return codes.contiguous().view(torch.int32)


def other_group(group: int) -> Refusal | None:
    if group in (32, 64, 128):
        return None
    return Refusal("shape", f"groups of {group}: written for 32, 64 and 128")


def unfit(
    platform: Platform, weight: Tensor, weight_scale: Tensor, bias: Tensor | None
) -> Refusal | None:
    """Refuse a weight that the kernels for 4-bit codes cannot read."""
    return (
        not_nvidia(platform)
        or unlike(FLOATS, bias=bias)
        or scattered(weight, "the weight")
        or scattered(weight_scale, "the scale of the weight")
    )
