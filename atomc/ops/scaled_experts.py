"""Mixtures of experts with quantized weights; names and sizes as in atomc.ops.experts.

A value is its code times its scale, as in atomc.ops.scaled_linear, of which these are the
products. Where x is quantized, the gated activation in between is quantized in the same way.
"""

from functools import partial
from typing import Unpack

import torch
from torch import Tensor

from atomc.ops.experts import ExpertOperands, Gate, gated, one_by_one
from atomc.ops.op import op
from atomc.ops.op_cost import experts
from atomc.ops.op_shapes import shape_of_x
from atomc.ops.op_traits import Arguments, Kind, QuantizedWeight
from atomc.ops.quant import (
    quant_fp8_group,
    quant_fp8_per_token,
    quant_fp8_static,
    quant_int8_per_token,
    quant_mxfp4,
)
from atomc.ops.scaled_linear import (
    linear_mxfp4,
    linear_w4a16,
    mxfp4_operand,
    mxfp4_rate,
    scaled_linear_fp8,
    scaled_linear_fp8_block,
    scaled_linear_int8,
)

STORED = ("w13", "w2", "w13_scale", "w2_scale")
_scaled_experts = partial(op, kind=Kind.EXPERTS, rows="x", cost=experts, shape=shape_of_x)


def _fp8_scales(arguments: Arguments) -> str:
    if block := arguments["block"]:
        return f"one scale per square of {block}"
    of_rows = arguments["w13_scale"].shape[1] > 1
    return "one scale per output" if of_rows else "one scale per expert"


def _group_scales(arguments: Arguments) -> str:
    zeros = "" if arguments["w13_zeros"] is None else ", with zeros"
    return f"one scale per {arguments['group']} inputs{zeros}"


FP8_EXPERTS = QuantizedWeight("fp8", _fp8_scales, codes=1, rate=2, stored=STORED, weights=2)
INT8_EXPERTS = QuantizedWeight(
    "int8", lambda _: "one scale per output", codes=1, rate=2, stored=STORED, weights=2
)
INT4_EXPERTS = QuantizedWeight(
    "int4",
    _group_scales,
    codes=8,
    rate=1,
    stored=(*STORED, "w13_zeros", "w2_zeros"),
    weights=2,
)
MXFP4_EXPERTS = QuantizedWeight(
    "mxfp4", lambda _: "one scale per 32 inputs", codes=2, rate=mxfp4_rate, stored=STORED, weights=2
)


class ScaledExpertOperands(ExpertOperands):
    """The arguments that all of these ops have."""

    w13_scale: Tensor
    w2_scale: Tensor


class EightBitExpertOperands(ScaledExpertOperands):
    """The arguments of moe_experts_int8, which moe_experts_fp8 has, too."""

    x_scale: Tensor
    out_dtype: torch.dtype


class Int4ExpertOperands(ScaledExpertOperands):
    """The arguments of moe_experts_w4a16."""

    w13_zeros: Tensor | None
    w2_zeros: Tensor | None
    group: int


def requantized_fp8(
    h: Tensor, dtype: torch.dtype, block: int, act_scale: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The gated activation as moe_experts_fp8 multiplies it: codes and scales."""
    if block:
        return quant_fp8_group.reference(h, block, dtype=dtype)
    if act_scale is None:
        return quant_fp8_per_token.reference(h, dtype)
    return quant_fp8_static.reference(h, act_scale, dtype), act_scale.expand(len(h), 1)


def requantized_mxfp4(
    h: Tensor, dtype: torch.dtype, x_scale: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """The gated activation as moe_experts_mxfp4 multiplies it where x has this dtype and scale."""
    if x_scale is None:
        return h, None
    if dtype == torch.uint8:
        return quant_mxfp4.reference(h)
    return quant_fp8_per_token.reference(h, dtype)


@_scaled_experts(
    quantized_weight=FP8_EXPERTS,
    linear=lambda arguments: scaled_linear_fp8_block if arguments["block"] else scaled_linear_fp8,
)
def moe_experts_fp8(
    x: Tensor,
    x_scale: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: Tensor,
    w13_scale: Tensor,
    w2: Tensor,
    w2_scale: Tensor,
    b13: Tensor | None = None,
    b2: Tensor | None = None,
    act_scale: Tensor | None = None,
    *,
    out_dtype: torch.dtype,
    block: int = 0,
    **gate: Unpack[Gate],
) -> Tensor:
    """moe_experts with x [T, H], w13 [E, 2I, H] and w2 [E, H, I] in fp8 -> [T, H] in out_dtype.
    Products are summed in fp32 and rounded to out_dtype, biases [E, ...] included.

    block  0: w13_scale [E, 1, 1] or [E, 2I, 1], w2_scale [E, 1, 1] or [E, H, 1] fp32; x_scale [1],
              or [T, 1] from quant_fp8_per_token; act_scale [1] is the scale of the gated activation
              if x_scale is [1], else None
           b: squares, w13_scale [E, ceil(2I / b), ceil(H / b)], w2_scale [E, ceil(H / b), ceil(I /
              b)], x_scale [T, ceil(H / b)] from quant_fp8_group (DeepSeek-V3, section 3.3.2)
    """

    def product(
        codes: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None
    ) -> Tensor:
        if block:
            return scaled_linear_fp8_block.reference(
                codes, weight, scale, weight_scale, bias, out_dtype=out_dtype, block=block
            )
        flat = weight_scale.flatten() if weight_scale.numel() == 1 else weight_scale
        return scaled_linear_fp8.reference(codes, weight, scale, flat, bias, out_dtype=out_dtype)

    def between(h: Tensor) -> tuple[Tensor, Tensor]:
        return requantized_fp8(gated(h, **gate), x.dtype, block, act_scale)

    scale = x_scale.expand(len(x), 1) if x_scale.dim() == 1 else x_scale
    up, down = (w13, w13_scale, b13), (w2, w2_scale, b2)
    return one_by_one(ids, weights, (x, scale), product, up, between, down)


@_scaled_experts(
    quantized_weight=INT8_EXPERTS,
    linear=lambda _: scaled_linear_int8,
)
def moe_experts_int8(
    x: Tensor,
    x_scale: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: Tensor,
    w13_scale: Tensor,
    w2: Tensor,
    w2_scale: Tensor,
    b13: Tensor | None = None,
    b2: Tensor | None = None,
    *,
    out_dtype: torch.dtype,
    **gate: Unpack[Gate],
) -> Tensor:
    """moe_experts with x [T, H], w13 [E, 2I, H] and w2 [E, H, I] in int8 -> [T, H] in out_dtype.
    x_scale [T, 1] from quant_int8_per_token, w13_scale [E, 2I, 1], w2_scale [E, H, 1], fp32.
    """

    def product(
        codes: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None
    ) -> Tensor:
        return scaled_linear_int8.reference(
            codes, weight, scale, weight_scale, bias, out_dtype=out_dtype
        )

    def between(h: Tensor) -> tuple[Tensor, Tensor]:
        return quant_int8_per_token.reference(gated(h, **gate))

    up, down = (w13, w13_scale, b13), (w2, w2_scale, b2)
    return one_by_one(ids, weights, (x, x_scale), product, up, between, down)


@_scaled_experts(
    quantized_weight=INT4_EXPERTS,
    linear=lambda _: linear_w4a16,
)
def moe_experts_w4a16(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: Tensor,
    w13_scale: Tensor,
    w2: Tensor,
    w2_scale: Tensor,
    w13_zeros: Tensor | None = None,
    w2_zeros: Tensor | None = None,
    b13: Tensor | None = None,
    b2: Tensor | None = None,
    *,
    group: int,
    **gate: Unpack[Gate],
) -> Tensor:
    """moe_experts with int4 weights as in linear_w4a16. x [T, H] of 16 bits or fp32 -> [T, H].

    w13, w2  [E, 2I, H/8] and [E, H, I/8] int32; scales [E, 2I, H/group] and [E, H, I/group]; zeros
             of their shapes, uint8, or None: 8
    """

    product = partial(linear_w4a16.reference, group=group)
    up, down = (w13, w13_scale, w13_zeros, b13), (w2, w2_scale, w2_zeros, b2)
    return one_by_one(ids, weights, (x,), product, up, lambda h: (gated(h, **gate),), down)


@_scaled_experts(
    quantized_weight=MXFP4_EXPERTS,
    linear=lambda _: linear_mxfp4,
    shape=lambda x, w2, out_dtype: x.new_empty((x.shape[0], w2.shape[1]), dtype=out_dtype),
)
def moe_experts_mxfp4(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: Tensor,
    w13_scale: Tensor,
    w2: Tensor,
    w2_scale: Tensor,
    b13: Tensor | None = None,
    b2: Tensor | None = None,
    x_scale: Tensor | None = None,
    *,
    out_dtype: torch.dtype,
    **gate: Unpack[Gate],
) -> Tensor:
    """moe_experts with MXFP4 weights as in linear_mxfp4 (GPT-OSS) -> [T, H] in out_dtype.

    w13, w2     [E, 2I, H/2] and [E, H, I/2] uint8; scales [E, 2I, H/32] and [E, H, I/32] uint8
    x, x_scale  [T, H] of 16 bits or fp32, and None; or fp8 with [T, 1]; or MXFP4, [T, H/2] and [T,
                H/32]
    """

    def product(rows: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None) -> Tensor:
        return linear_mxfp4.reference(rows, weight, weight_scale, None, bias, out_dtype=out_dtype)

    def between(h: Tensor) -> tuple[Tensor]:
        return (mxfp4_operand(*requantized_mxfp4(gated(h, **gate), x.dtype, x_scale)),)

    up, down = (w13, w13_scale, b13), (w2, w2_scale, b2)
    return one_by_one(ids, weights, (mxfp4_operand(x, x_scale),), product, up, between, down)
