"""Linear layers with quantized operands: x @ weight.T of the dequantized operands, summed in fp32,
rounded once.

K inputs, N outputs. A value is its code times its scale. The parameters of a weight have one row
per output, [N, ...], so that layers with one input can be concatenated.
"""

from collections.abc import Sequence
from functools import partial
from typing import TypedDict

import torch
import torch.nn.functional as F
from torch import Tensor

from atomc.ops.formats import (
    NVFP4_GROUP,
    e2m1_values,
    e8m0_values,
    grouped_columns,
    unpack_e2m1,
    unpack_int4,
)
from atomc.ops.linear import stacked
from atomc.ops.op import op
from atomc.ops.op_cost import product
from atomc.ops.op_shapes import rows_of_product
from atomc.ops.op_traits import Arguments, Kind, QuantizedWeight

_WITH_SCALE = ("weight", "weight_scale")
_scaled_linear = partial(op, kind=Kind.LINEAR, rows="x", cost=product, shape=rows_of_product)


class ScaledOperands(TypedDict):
    """The arguments of scaled_linear_fp8 and scaled_linear_int8, which explain them."""

    x: Tensor
    weight: Tensor
    x_scale: Tensor
    weight_scale: Tensor
    bias: Tensor | None
    out_dtype: torch.dtype


def _finish(total: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    return (total if bias is None else total + bias.to(torch.float32)).to(out_dtype)


def _output_scales(arguments: Arguments) -> str:
    return "one scale" if arguments["weight_scale"].numel() == 1 else "one scale per output"


def _group_scales(arguments: Arguments) -> str:
    zeros = "" if arguments["zeros"] is None else ", with zeros"
    return f"one scale per {arguments['group']} inputs{zeros}"


# Rates of quantized products relative to the bf16 peak, the same on all machines that have them.
FP8_WEIGHT = QuantizedWeight("fp8", _output_scales, codes=1, rate=2)
FP8_BLOCK_WEIGHT = QuantizedWeight(
    "fp8", lambda arguments: f"one scale per square of {arguments['block']}", codes=1, rate=2
)
INT8_WEIGHT = QuantizedWeight("int8", _output_scales, codes=1, rate=2)
INT4_WEIGHT = QuantizedWeight(
    "int4", _group_scales, codes=8, rate=1, stored=("weight", "weight_scale", "zeros")
)


def mxfp4_rate(arguments: Arguments) -> int:
    """By the activations: no machine multiplies MXFP4 by 16 bits, the codes are converted."""
    x = arguments["x"].dtype
    return 4 if x == torch.uint8 else 2 if x.itemsize == 1 else 1


MXFP4_WEIGHT = QuantizedWeight(
    "mxfp4", lambda _: "one scale per 32 inputs", codes=2, rate=mxfp4_rate
)

NVFP4_WEIGHT = QuantizedWeight(
    "nvfp4",
    lambda _: "one scale per 16 inputs",
    codes=2,
    rate=1,
    stored=("weight", "weight_scale", "global_scale"),
)


def _stacked_fp8(calls: Sequence[Arguments]) -> tuple[str, ...]:
    """A scale per output is concatenated with its row. One scale per weight must be the same
    parameter in all calls.
    """
    has_row_scales = calls[0]["weight_scale"].dim() == 2
    return stacked(_WITH_SCALE if has_row_scales else ("weight",), calls)


@_scaled_linear(
    quantized_weight=FP8_WEIGHT,
    concat=_stacked_fp8,
)
def scaled_linear_fp8(
    x: Tensor,
    weight: Tensor,
    x_scale: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    *,
    out_dtype: torch.dtype,
) -> Tensor:
    """(x @ weight.T) * x_scale * weight_scale + bias. x [..., K] and weight [N, K] fp8 -> [..., N]
    in out_dtype. bias [N].

    x_scale       fp32, [1], or [..., 1]: one per row
    weight_scale  fp32, [1], or [N, 1]: one per output
    """
    total = F.linear(x.to(torch.float32), weight.to(torch.float32))
    return _finish(total * x_scale * weight_scale.flatten(), bias, out_dtype)


def fp8_block_values(weight: Tensor, weight_scale: Tensor, block: int) -> Tensor:
    """fp32 [N, K] of the parameters of scaled_linear_fp8_block."""
    rows, columns = weight.shape
    squares = weight_scale.to(torch.float32).repeat_interleave(block, 0)[:rows]
    values: Tensor = weight.to(torch.float32) * squares.repeat_interleave(block, 1)[:, :columns]
    return values


def _stacked_blocks(calls: Sequence[Arguments]) -> tuple[str, ...] | str:
    block = calls[0]["block"]
    for arguments in calls[:-1]:
        rows = arguments["weight"].shape[0]
        if rows % block:
            return f"{rows} rows end inside a block of {block} that shares one scale"
    return stacked(_WITH_SCALE, calls)


@_scaled_linear(
    quantized_weight=FP8_BLOCK_WEIGHT,
    concat=_stacked_blocks,
)
def scaled_linear_fp8_block(
    x: Tensor,
    weight: Tensor,
    x_scale: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    *,
    out_dtype: torch.dtype,
    block: int = 128,
) -> Tensor:
    """x @ weight.T + bias of the dequantized operands (DeepSeek-V3, section 3.3.2). x [..., K] and
    weight [N, K] fp8 -> [..., N] in out_dtype. bias [N].

    x_scale       fp32 [..., ceil(K / block)], from quant_fp8_group
    weight_scale  fp32 [ceil(N / block), ceil(K / block)]: one per square
    """
    by_row = x_scale.to(torch.float32).repeat_interleave(block, -1)[..., : weight.shape[1]]
    values = fp8_block_values(weight, weight_scale, block)
    return _finish(F.linear(x.to(torch.float32) * by_row, values), bias, out_dtype)


@_scaled_linear(
    quantized_weight=INT8_WEIGHT,
    concat=partial(stacked, _WITH_SCALE),
)
def scaled_linear_int8(
    x: Tensor,
    weight: Tensor,
    x_scale: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    *,
    out_dtype: torch.dtype,
) -> Tensor:
    """(x @ weight.T) * x_scale * weight_scale + bias; the sum of integers is exact.

    x [..., K] and weight [N, K] int8, x_scale [..., 1] and weight_scale [N, 1] fp32, bias [N] ->
    [..., N] in out_dtype.
    """
    # Products and sums of this size are exact in fp64, whose matrix product all devices have.
    total = F.linear(x.to(torch.float64), weight.to(torch.float64)).to(torch.float32)
    return _finish(total * x_scale * weight_scale.flatten(), bias, out_dtype)


def int4_weight(weight: Tensor, weight_scale: Tensor, zeros: Tensor | None, group: int) -> Tensor:
    """fp32 [N, K] of the parameters of linear_w4a16."""
    codes = grouped_columns(unpack_int4(weight).to(torch.float32), group)
    offset = 8.0 if zeros is None else zeros.to(torch.float32).unsqueeze(-1)
    return ((codes - offset) * weight_scale.to(torch.float32).unsqueeze(-1)).flatten(-2)


def _stacked_int4(calls: Sequence[Arguments]) -> tuple[str, ...]:
    zeros = () if calls[0]["zeros"] is None else ("zeros",)
    return stacked((*_WITH_SCALE, *zeros), calls)


@_scaled_linear(
    quantized_weight=INT4_WEIGHT,
    concat=_stacked_int4,
)
def linear_w4a16(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    zeros: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    group: int,
) -> Tensor:
    """x @ ((code - zero) * weight_scale).T + bias (GPTQ, Frantar et al. 2023; AWQ, Lin et al.
    2024). x [..., K] of 16 bits or fp32 -> [..., N] in x.dtype. bias [N].

    weight        [N, K/8] int32, eight codes 0..15 per word (atomc.ops.formats)
    weight_scale  [N, K/group]; K is a multiple of group
    zeros         [N, K/group] uint8, 0..15; None: 8 (symmetric, -8..7)
    """
    return _finish(
        F.linear(x.to(torch.float32), int4_weight(weight, weight_scale, zeros, group)),
        bias,
        x.dtype,
    )


def mxfp4_values(packed: Tensor, scale: Tensor) -> Tensor:
    """fp32 [..., K] of packed e2m1 [..., K/2] and e8m0 scales [..., K/32]."""
    values = grouped_columns(e2m1_values(unpack_e2m1(packed)), 32)
    return (values * e8m0_values(scale).unsqueeze(-1)).flatten(-2)


def mxfp4_operand(x: Tensor, x_scale: Tensor | None) -> Tensor:
    """fp32 [..., K] of the x and x_scale of linear_mxfp4."""
    if x_scale is None:
        return x.to(torch.float32)
    return mxfp4_values(x, x_scale) if x.dtype == torch.uint8 else x.to(torch.float32) * x_scale


@_scaled_linear(
    quantized_weight=MXFP4_WEIGHT,
    concat=partial(stacked, _WITH_SCALE),
)
def linear_mxfp4(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    x_scale: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    out_dtype: torch.dtype,
) -> Tensor:
    """x @ weight.T + bias with an MXFP4 weight (OCP Microscaling v1.0) -> [..., N] in out_dtype.

    weight        [N, K/2] uint8, two e2m1 codes per byte
    weight_scale  [N, K/32] uint8, e8m0
    x, x_scale    [..., K] of 16 bits or fp32, and None; or fp8 with [1] or [..., 1]; or MXFP4,
                  [..., K/2] and [..., K/32]
    """
    values = F.linear(mxfp4_operand(x, x_scale), mxfp4_values(weight, weight_scale))
    return _finish(values, bias, out_dtype)


def nvfp4_values(packed: Tensor, scale: Tensor, global_scale: Tensor) -> Tensor:
    """fp32 [N, K] of the parameters of linear_nvfp4."""
    # A code times its scale has 6 bits and is exact; only the last product rounds.
    groups = grouped_columns(e2m1_values(unpack_e2m1(packed)), NVFP4_GROUP)
    return (groups * scale.to(torch.float32).unsqueeze(-1)).flatten(-2) * global_scale


@_scaled_linear(
    quantized_weight=NVFP4_WEIGHT,
    concat=partial(stacked, (*_WITH_SCALE, "global_scale")),
)
def linear_nvfp4(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    global_scale: Tensor,
    bias: Tensor | None = None,
) -> Tensor:
    """x @ (code * weight_scale * global_scale).T + bias with an NVFP4 weight. x [..., K] of 16 bits
    or fp32 -> [..., N] in x.dtype. bias [N].

    weight        [N, K/2] uint8, two e2m1 codes per byte
    weight_scale  [N, K/16] e4m3fn
    global_scale  [N, 1] fp32: checkpoints have one number per weight, which differs between layers
                  that are merged
    """
    values = nvfp4_values(weight, weight_scale, global_scale)
    return _finish(F.linear(x.to(torch.float32), values), bias, x.dtype)
