"""Decode MXFP4 and NVFP4 in Triton: e2m1 values, e8m0 and e4m3 scales, exactly, by integer
operations on every device.
"""

import triton
import triton.language as tl


@triton.jit
def e8m0_values(code):
    """2^(code - 127) in fp32; 255 is NaN."""
    code = code.to(tl.int32)
    # 2^-127 is a subnormal.
    bits = tl.where(code == 0, 0x400000, code << 23)
    return tl.where(code == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def e4m3_values(code):
    """The number of an e4m3fn code, in fp32; 127 is NaN."""
    code = code.to(tl.int32)
    # Exponent and mantissa are adjacent, as in fp32, also of subnormals. The biases differ by 120.
    bits = ((code & 127) << 20) | ((code & 128) << 24)
    value = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36
    return tl.where(code & 127 == 127, float("nan"), value)


@triton.jit
def e2m1_values(code):
    """fp32 values of codes 0..15."""
    code = code.to(tl.int32)
    size = code & 7
    normal = (((size >> 1) + 126) << 23) | ((size & 1) << 22)
    value = tl.where(size < 2, size * 0.5, normal.to(tl.float32, bitcast=True))
    return tl.where(code > 7, -value, value)


@triton.jit
def e2m1_rows(rows_ptr, column, inside):
    """fp16 values of packed rows at these columns; rows_ptr points to their first bytes."""
    packed = tl.load(rows_ptr + column // 2, inside, 0).to(tl.int32)
    return e2m1_values((packed >> ((column % 2) * 4)) & 15).to(tl.float16)
