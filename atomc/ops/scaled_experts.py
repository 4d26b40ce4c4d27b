"""Mixtures of experts with quantized weights; names and sizes as in atomc.ops.experts.

A value is its code times its scale, as in atomc.ops.scaled_linear, of which these are the
products. Where x is quantized, the gated activation in between is quantized in the same way.
"""

from functools import partial
from typing import Unpack

import torch
from torch import Tensor

from atomc.ops.experts import ExpertOperands, Gate, gated, sum_over_experts
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


def _expert_bias(bias: Tensor | None, e: int) -> Tensor | None:
    return None if bias is None else bias[e]


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

    def expert(e: int, rows: Tensor) -> Tensor:
        scale = x_scale if x_scale.dim() == 1 else x_scale[rows]
        h = product(x[rows], scale, w13[e], w13_scale[e], _expert_bias(b13, e))
        h = gated(h, **gate)
        if block:
            codes, scale = quant_fp8_group.reference(h, block, dtype=x.dtype)
        elif act_scale is None:
            codes, scale = quant_fp8_per_token.reference(h, x.dtype)
        else:
            codes, scale = quant_fp8_static.reference(h, act_scale, x.dtype), act_scale
        return product(codes, scale, w2[e], w2_scale[e], _expert_bias(b2, e))

    def product(
        codes: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None
    ) -> Tensor:
        if block:
            return scaled_linear_fp8_block.reference(
                codes, weight, scale, weight_scale, bias, out_dtype=out_dtype, block=block
            )
        flat = weight_scale.flatten() if weight_scale.numel() == 1 else weight_scale
        return scaled_linear_fp8.reference(codes, weight, scale, flat, bias, out_dtype=out_dtype)

    products = x.new_zeros(*ids.shape, x.shape[-1], dtype=out_dtype)
    return sum_over_experts(ids, weights, len(w13), products, expert)


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

    def expert(e: int, rows: Tensor) -> Tensor:
        h = scaled_linear_int8.reference(
            x[rows], w13[e], x_scale[rows], w13_scale[e], _expert_bias(b13, e), out_dtype=out_dtype
        )
        codes, scale = quant_int8_per_token.reference(gated(h, **gate))
        return scaled_linear_int8.reference(
            codes, w2[e], scale, w2_scale[e], _expert_bias(b2, e), out_dtype=out_dtype
        )

    products = x.new_zeros(*ids.shape, x.shape[-1], dtype=out_dtype)
    return sum_over_experts(ids, weights, len(w13), products, expert)


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

    def expert(e: int, rows: Tensor) -> Tensor:
        h = linear_w4a16.reference(
            x[rows],
            w13[e],
            w13_scale[e],
            _expert_bias(w13_zeros, e),
            _expert_bias(b13, e),
            group=group,
        )
        h = gated(h, **gate)
        return linear_w4a16.reference(
            h, w2[e], w2_scale[e], _expert_bias(w2_zeros, e), _expert_bias(b2, e), group=group
        )

    products = x.new_zeros(*ids.shape, x.shape[-1])
    return sum_over_experts(ids, weights, len(w13), products, expert)


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

    def expert(e: int, rows: Tensor) -> Tensor:
        scale = None if x_scale is None else x_scale[rows]
        h = product(x[rows], scale, w13[e], w13_scale[e], _expert_bias(b13, e))
        h = gated(h, **gate)
        if x_scale is None:
            return product(h, None, w2[e], w2_scale[e], _expert_bias(b2, e))
        if x.dtype == torch.uint8:
            return product(*quant_mxfp4.reference(h), w2[e], w2_scale[e], _expert_bias(b2, e))
        codes, scale = quant_fp8_per_token.reference(h, x.dtype)
        return product(codes, scale, w2[e], w2_scale[e], _expert_bias(b2, e))

    def product(
        codes: Tensor,
        scale: Tensor | None,
        weight: Tensor,
        weight_scale: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        return linear_mxfp4.reference(codes, weight, weight_scale, scale, bias, out_dtype=out_dtype)

    products = x.new_zeros(*ids.shape, w2.shape[1], dtype=out_dtype)
    return sum_over_experts(ids, weights, len(w13), products, expert)
