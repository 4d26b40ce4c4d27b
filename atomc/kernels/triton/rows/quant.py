"""Quantizers in Triton, and the quantized store of fused kernels.

Codes equal those of the reference bit for bit: the operations are the same, with the same
roundings. Magnitudes are compared by their bits, as integers, in which order NaN is the largest.

A tile is ROWS x BLOCK values, padded by zeros.
"""

import functools
import struct
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from atomc import ops
from atomc.kernels.checks import first_refusal, odd_group, too_wide, unknown
from atomc.kernels.triton.launch.launch import (
    at,
    begin,
    inner_sizes,
    num_rows,
    overlap,
    row_tile,
    rows_of,
    unfit,
)
from atomc.kernels.triton.launch.tiles import QUANT, QUANT_BLOCK
from atomc.ops.formats import AMAX_FLOOR, FP8, MX_ROUNDINGS
from atomc.ops.op import Refusal
from atomc.ops.quant import empty_group_scales
from atomc.ops.schemes import SCHEMES
from atomc.platform import Platform

MAX_COLUMNS = 65536
FLOOR_BITS = constexpr(struct.unpack("<i", struct.pack("<f", AMAX_FLOOR))[0])


@triton.jit
def amax_bits(y, AXIS: constexpr):
    return tl.max(y.to(tl.int32, bitcast=True) & 0x7FFFFFFF, AXIS)


@triton.jit
def amax_scale(y, AXIS: constexpr, LARGEST: constexpr):
    """The scale of the values along an axis."""
    return tl.maximum(amax_bits(y, AXIS), FLOOR_BITS).to(tl.float32, bitcast=True) * (1.0 / LARGEST)


@triton.jit
def fp8_codes(x, FNUZ: constexpr, BY_BITS: constexpr):
    """x, fp32, clamped and rounded to a code in uint8; BY_BITS if the device has no instruction for
    it.
    """
    LARGEST: constexpr = 240.0 if FNUZ else 448.0
    x = tl.clamp(x, -LARGEST, LARGEST, tl.PropagateNan.ALL)
    if BY_BITS:
        size = tl.abs(x)
        bits = size.to(tl.int32, bitcast=True)
        # Keep three bits of mantissa. Subnormal codes are evenly spaced, like fp32 numbers near
        # 2^14 (2^13).
        LEAST_BITS: constexpr = 0x3C000000 if FNUZ else 0x3C800000
        code = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - ((LEAST_BITS >> 20) - 8)
        small = (size + (8192.0 if FNUZ else 16384.0)).to(tl.int32, bitcast=True) & 15
        code = tl.where(bits < LEAST_BITS, small, code)
        sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
        if FNUZ:
            return tl.where(x == x, tl.where(code == 0, 0, code | sign), 0x80).to(tl.uint8)
        return tl.where(x == x, code | sign, 0x7F).to(tl.uint8)
    elif FNUZ:
        return x.to(tl.float8e4b8).to(tl.uint8, bitcast=True)
    else:
        return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)


@triton.jit
def _int8(x):
    """x, fp32, clamped and rounded to nearest even."""
    # Near 1.5 * 2^23 the spacing of fp32 is 1.
    return (tl.clamp(x, -127.0, 127.0) + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)


@triton.jit
def _number(value: constexpr, like):
    return tl.full((), value, like.dtype)


@triton.jit
def e2m1_codes(x):
    """The codes of x, fp32 or fp16, as integers of the same width; 16-bit values are computed two
    per instruction.
    """
    SHORT: constexpr = x.dtype == tl.float16
    BITS: constexpr = tl.int16 if SHORT else tl.int32
    bits = x.to(BITS, bitcast=True)
    size = tl.minimum(tl.maximum(tl.abs(x), _number(0.0, x)), _number(6.0, x))  # NaN becomes 0
    # Codes near `size` are spaced by half of `power`, which is 1, 2 or 4. So is the last bit of 512
    # * power in fp16, and of 2^22 * power in fp32: adding that rounds to a code. An offset (0, 2 or
    # 4, and 8 for the sign) makes its last four bits the code.
    power = tl.maximum(size, _number(1.0, x)).to(BITS, bitcast=True) & _number(
        0x7C00 if SHORT else 0x7F800000, bits
    )
    signed = (power | (bits & _number(-0x8000 if SHORT else -0x80000000, bits))).to(
        x.dtype, bitcast=True
    )
    power = power.to(x.dtype, bitcast=True)
    start = tl.maximum(power * _number(3.0, x) - _number(4.0, x), _number(0.0, x))
    start += power * _number(514.0 if SHORT else 4194306.0, x) + signed * _number(-2.0, x)
    return (start + size).to(BITS, bitcast=True) & _number(15, bits)


class Codes(NamedTuple):
    """Where a kernel stores the codes and scales of rows.

    static                 the scale of fp8_static
    row_step, group_step   strides of the scales
    """

    codes: Tensor
    scales: Tensor
    static: Tensor | None
    row_step: int
    group_step: int


class Coding(NamedTuple):
    """How a kernel computes codes: a constant of it.

    scheme   one of atomc.ops.schemes; "": there are no codes
    by_bits  the device has no instruction that rounds to this fp8 dtype
    """

    scheme: str = ""
    group: int = 1
    fnuz: bool = False
    by_bits: bool = False
    mx_bias: int = 0


@triton.jit
def store_quantized(y, out, row, first, rows, D, CODING: constexpr):
    """Quantize a floating-point tile [ROWS, BLOCK], and store its codes and scales in Codes.

    row [ROWS, 1], less than `rows`; the columns start at `first`, and are all D columns if a row
    has one scale.
    """
    SCHEME: constexpr = CODING.scheme
    GROUP: constexpr = CODING.group
    FNUZ: constexpr = CODING.fnuz
    ROWS: constexpr = y.shape[0]
    BLOCK: constexpr = y.shape[1]
    INT8: constexpr = SCHEME == "int8_per_token"
    LARGEST: constexpr = 127.0 if INT8 else 240.0 if FNUZ else 448.0
    DTYPE: constexpr = y.dtype
    row = row.to(tl.int64)
    y = y.to(tl.float32)
    group = first // GROUP + tl.arange(0, BLOCK // GROUP)[None, :]
    scale_at = out.scales + row * out.row_step + group * out.group_step
    there = (row < rows) & (group < (D + GROUP - 1) // GROUP)
    grouped = tl.reshape(y, (ROWS, BLOCK // GROUP, GROUP))
    if SCHEME == "mxfp4":
        amax = amax_bits(grouped, 2)
        code = tl.maximum(((amax + CODING.mx_bias) >> 23) - 2, 0)
        code = tl.where(amax >= 0x7F800000, 255, code)
        tl.store(scale_at, code.to(tl.uint8), there)
        # 2^-127 is a subnormal.
        exponent = tl.maximum(254 - code, 0)
        inverse = tl.where(exponent == 0, 0x400000, exponent << 23).to(tl.float32, bitcast=True)
        # Of a 16-bit y, values of at least 0.25 are exact in fp16, and smaller ones become 0 as in
        # fp32.
        scaled = (grouped * inverse[:, :, None]).to(
            tl.float32 if tl.float32 == DTYPE else tl.float16
        )
        low, high = tl.split(e2m1_codes(tl.reshape(scaled, (ROWS, BLOCK // 2, 2))))
        pair = first // 2 + tl.arange(0, BLOCK // 2)[None, :]
        tl.store(
            out.codes + row * (D // 2) + pair,
            (low | (high << 4)).to(tl.uint8),
            (row < rows) & (pair < D // 2),
        )
    else:
        if SCHEME == "fp8_static":
            y *= tl.div_rn(1.0, tl.load(out.static).to(tl.float32))
        elif SCHEME == "fp8_group":
            scale = amax_scale(grouped, 2, LARGEST)
            tl.store(scale_at, scale, there)
            y = tl.reshape(grouped * tl.div_rn(1.0, scale)[:, :, None], (ROWS, BLOCK))
        else:
            scale = amax_scale(y, 1, LARGEST)[:, None]
            tl.store(out.scales + row, scale, row < rows)
            y *= tl.div_rn(1.0, scale)
        code = _int8(y) if INT8 else fp8_codes(y, FNUZ, CODING.by_bits)
        column = first + tl.arange(0, BLOCK)[None, :]
        tl.store(out.codes + row * D + column, code, (row < rows) & (column < D))


@triton.jit(do_not_specialize=["rows"])
def _quantize(
    x,
    out,
    rows,
    sizes,
    D: constexpr,
    BLOCK: constexpr,
    ROWS: constexpr,
    CODING: constexpr,
    PDL: constexpr,
):
    first = tl.program_id(1) * BLOCK
    row, column, inside = row_tile(rows, D, first, ROWS, BLOCK)
    begin(PDL)
    y = tl.load(at(x, row, sizes) + column, inside, 0.0)
    store_quantized(y, out, row, first, rows, D, CODING)


@functools.cache
def lacks_fp8_rounding(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a device has no instruction that rounds to this fp8 dtype. (Triton's interpreter
    rounds some values down.)
    """
    if device.type != "cuda":
        return True
    fnuz = dtype == torch.float8_e4m3fnuz
    if torch.version.hip:
        arch = torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
        return arch != ("gfx942" if fnuz else "gfx950")
    return fnuz or torch.cuda.get_device_capability(device) < (8, 9)


class Quantized:
    """Empty codes and scales for rows shaped as x, and how `store_quantized` fills them."""

    def __init__(
        self,
        x: Tensor,
        scale: Tensor | None,
        scheme: str,
        dtype: torch.dtype = torch.float8_e4m3fn,
        group: int = 128,
        column_major: bool = False,
        rounding: str = "even",
    ):
        lead, width = x.shape[:-1], x.shape[-1]
        steps = (1, 0)
        self.whole_rows = scheme.endswith("per_token")
        self.group = 32 if scheme == "mxfp4" else group if scheme == "fp8_group" else 1
        if scheme == "mxfp4":
            self.codes = x.new_empty((*lead, width // 2), dtype=torch.uint8)
            self.scales = x.new_empty((*lead, width // 32), dtype=torch.uint8)
            steps = (width // 32, 1)
        else:
            self.codes = x.new_empty(
                x.shape, dtype=torch.int8 if scheme == "int8_per_token" else dtype
            )
            self.scales = x.new_empty((*lead, 1) if self.whole_rows else 0, dtype=torch.float32)
        if scheme == "fp8_group":
            groups = triton.cdiv(width, group)
            self.scales = empty_group_scales(x, groups, column_major)
            steps = (1, num_rows(x)) if column_major else (groups, 1)
        fp8 = scheme.startswith("fp8")
        codes = self.codes if self.codes.dtype == torch.int8 else self.codes.view(torch.uint8)
        self.into = Codes(codes, self.scales, scale, *steps)
        self.coding = Coding(
            scheme,
            self.group,
            dtype == torch.float8_e4m3fnuz,
            fp8 and lacks_fp8_rounding(dtype, x.device),
            MX_ROUNDINGS[rounding],
        )

    def tile(self, rows: int, columns: int) -> dict[str, int]:
        """The launch arguments for this number of rows and columns; whole rows, if a row has one
        scale.
        """
        block = triton.next_power_of_2(columns)
        if not self.whole_rows:
            block = min(block, QUANT_BLOCK)
        block = max(block, self.group)
        return QUANT.choose(self.codes.device, rows, block).launch(block)


def unquantizable(
    platform: Platform,
    x: Tensor,
    scheme: str,
    dtype: torch.dtype = torch.float8_e4m3fn,
    group: int = 128,
    rounding: str = "even",
    name: str = "x",
) -> Refusal | None:
    """Refuse rows of x that `store_quantized` cannot quantize in this scheme."""
    if reason := unfit(platform, **{name: x}) or unknown(SCHEMES, scheme=scheme):
        return reason
    width = x.shape[-1]
    if scheme.startswith("fp8") and dtype not in FP8:
        return Refusal("dtype", f"fp8 dtype {dtype} is not one of {FP8}")
    if scheme == "fp8_group" and (reason := odd_group(group, 16)):
        return reason
    if scheme == "mxfp4" and (width % 32 or rounding not in MX_ROUNDINGS):
        return Refusal(
            "shape",
            f"mxfp4 takes rows of a multiple of 32, here {width}, rounded as one of "
            f"{tuple(MX_ROUNDINGS)}",
        )
    return too_wide(width, MAX_COLUMNS)


def _launch(x: Tensor, out: Quantized) -> tuple[Tensor, Tensor]:
    if rows := num_rows(x):
        tile = out.tile(rows, x.shape[-1])
        columns = triton.cdiv(x.shape[-1], tile["BLOCK"])
        _quantize[(triton.cdiv(rows, tile["ROWS"]), columns)](
            rows_of(x),
            out.into,
            rows,
            inner_sizes(x),
            D=x.shape[-1],
            CODING=out.coding,
            **tile,
            **overlap(x.device),
        )
    return out.codes, out.scales


@ops.quant_fp8_static.kernel(
    "triton", refuses=first_refusal(unquantizable, scheme="fp8_static"), tuned_for=QUANT.archs
)
def quant_fp8_static(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return _launch(x, Quantized(x, scale, "fp8_static", dtype))[0]


@ops.quant_fp8_per_token.kernel(
    "triton", refuses=first_refusal(unquantizable, scheme="fp8_per_token"), tuned_for=QUANT.archs
)
def quant_fp8_per_token(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return _launch(x, Quantized(x, None, "fp8_per_token", dtype))


@ops.quant_fp8_group.kernel(
    "triton", refuses=first_refusal(unquantizable, scheme="fp8_group"), tuned_for=QUANT.archs
)
def quant_fp8_group(
    x: Tensor, group: int, column_major_scales: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    return _launch(x, Quantized(x, None, "fp8_group", dtype, group, column_major_scales))


@ops.quant_mxfp4.kernel(
    "triton", refuses=first_refusal(unquantizable, scheme="mxfp4"), tuned_for=QUANT.archs
)
def quant_mxfp4(x: Tensor, rounding: str) -> tuple[Tensor, Tensor]:
    return _launch(x, Quantized(x, None, "mxfp4", rounding=rounding))


@ops.quant_int8_per_token.kernel(
    "triton", refuses=first_refusal(unquantizable, scheme="int8_per_token"), tuned_for=QUANT.archs
)
def quant_int8_per_token(x: Tensor) -> tuple[Tensor, Tensor]:
    return _launch(x, Quantized(x, None, "int8_per_token"))
