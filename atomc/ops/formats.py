"""The floating-point dtypes of models; encoding and decoding of 4-bit and 8-bit number formats, in
plain PyTorch.

fp8    e4m3fn (largest 448) and e4m3fnuz (largest 240; no negative zero, its bits are NaN), dtypes
       of torch
e8m0   uint8, an exponent: 2^(byte - 127); 255 is NaN
e2m1   four bits, sign and one of 0, 0.5, 1, 1.5, 2, 3, 4, 6; two codes per byte, the even
       index in the low bits
int4   four bits, 0..15, eight codes per int32, index i at bits 4i
"""

import torch
from torch import Tensor

HALVES = (torch.bfloat16, torch.float16)
FLOATS = (*HALVES, torch.float32)
FP8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)
# Values of NVFP4 that share a scale.
NVFP4_GROUP = 16
# The lower bound of an amax: no scale is zero, and zeros remain zeros.
AMAX_FLOOR = 1e-10
# Added to the bits of a float32 before its mantissa is truncated; rounds the exponent up
MX_ROUNDINGS = {
    # for mantissas of at least 1.75: an amax of 6 to 7 is encoded as 6 (AITER's Triton kernels)
    "even": 0x200000,
    # for mantissas above 1.5: the smallest scale with amax / scale <= 6 (AITER's HIP kernels)
    "up": 0x3FFFFF,
}


def grouped_columns(x: Tensor, size: int) -> Tensor:
    """x [..., K] as [..., K / size, size]."""
    return x.reshape(*x.shape[:-1], x.shape[-1] // size, size)


def e8m0_values(codes: Tensor) -> Tensor:
    """2^(code - 127) in fp32. codes uint8 -> the same shape."""
    bits = codes.to(torch.int32)
    values = (bits << 23).view(torch.float32)
    values = torch.where(bits == 0, 2.0**-127, values)
    return torch.where(bits == 255, float("nan"), values)


def e8m0_scales(amax: Tensor, rounding: str) -> Tensor:
    """The scale codes (uint8) of e2m1 blocks; amax (fp32, >= 0 or NaN): largest magnitudes."""
    bits = amax.view(torch.int32)
    # The largest exponent of e2m1 is 2.
    codes = (((bits + MX_ROUNDINGS[rounding]) >> 23) - 2).clamp(min=0)
    return torch.where(bits >> 23 >= 255, 255, codes).to(torch.uint8)


def e2m1_codes(x: Tensor) -> Tensor:
    """The nearest code 0..15 (uint8) of x (fp32), ties to even, saturated at 6; NaN becomes 0."""
    size = x.abs()
    code = (size > 0.25).to(torch.uint8)
    for border in (0.75, 1.25, 1.75, 2.5, 3.5, 5.0):
        # A tie rounds to the even code: 2, 2, 4, 4, 6, 6 at these borders.
        code = code + (size >= border if border in (0.75, 1.75, 3.5) else size > border).to(
            torch.uint8
        )
    return code + torch.signbit(x).to(torch.uint8) * 8


def e2m1_values(codes: Tensor) -> Tensor:
    """fp32 values of codes 0..15."""
    size = (codes & 7).to(torch.int32)
    quarters = torch.where(size < 2, 2 * size, (2 + (size & 1)) << (size >> 1))
    values = quarters.to(torch.float32) * 0.25
    return torch.where(codes > 7, -values, values)


def pack_e2m1(codes: Tensor) -> Tensor:
    """codes uint8 [..., K] -> [..., K/2]."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_e2m1(packed: Tensor) -> Tensor:
    """uint8 [..., K/2] -> codes [..., K]."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


def pack_int4(codes: Tensor) -> Tensor:
    """Integers 0..15 [..., K] -> int32 [..., K/8]."""
    words = grouped_columns(codes.to(torch.int32), 8)
    packed = words[..., 0]
    for i in range(1, 8):
        packed = packed | (words[..., i] << (4 * i))
    return packed


def unpack_int4(packed: Tensor) -> Tensor:
    """int32 [..., K/8] -> int32 0..15 [..., K]."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=packed.device)
    return ((packed.unsqueeze(-1) >> shifts) & 15).flatten(-2)
