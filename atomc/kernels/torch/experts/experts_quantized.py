"""Experts with quantized weights on a CPU, one after another; the codes of an expert are converted
to fp32 a few rows at a time.
"""

from typing import Unpack

import torch
from torch import Tensor

from atomc import ops
from atomc.kernels.checks import refuse_gpus
from atomc.kernels.cpu_linears import finish
from atomc.kernels.dequantized import multiply, mxfp4_operand, mxfp4_values
from atomc.kernels.torch import scaled_linear_fp8 as fp8
from atomc.ops.experts import Gate, gated, one_by_one
from atomc.ops.quant import quant_int8_per_token
from atomc.ops.scaled_experts import requantized_fp8, requantized_mxfp4
from atomc.ops.scaled_linear import int4_weight


@ops.moe_experts_fp8.kernel("torch", refuses=refuse_gpus, syncs=True)
def moe_experts_fp8(
    x: Tensor,
    x_scale: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: Tensor,
    w13_scale: Tensor,
    w2: Tensor,
    w2_scale: Tensor,
    b13: Tensor | None,
    b2: Tensor | None,
    act_scale: Tensor | None,
    out_dtype: torch.dtype,
    block: int,
    **gate: Unpack[Gate],
) -> Tensor:
    def product(
        codes: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None
    ) -> Tensor:
        if block:
            return fp8.scaled_linear_fp8_block(
                codes, weight, scale, weight_scale, bias, out_dtype=out_dtype, block=block
            )
        return fp8.scaled_linear_fp8(codes, weight, scale, weight_scale, bias, out_dtype=out_dtype)

    def between(h: Tensor) -> tuple[Tensor, Tensor]:
        return requantized_fp8(gated(h, **gate), x.dtype, block, act_scale)

    scale = x_scale.expand(len(x), 1) if x_scale.dim() == 1 else x_scale
    up, down = (w13, w13_scale, b13), (w2, w2_scale, b2)
    return one_by_one(ids, weights, (x, scale), product, up, between, down)


@ops.moe_experts_int8.kernel("torch", refuses=refuse_gpus, syncs=True)
def moe_experts_int8(
    x: Tensor,
    x_scale: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: Tensor,
    w13_scale: Tensor,
    w2: Tensor,
    w2_scale: Tensor,
    b13: Tensor | None,
    b2: Tensor | None,
    out_dtype: torch.dtype,
    **gate: Unpack[Gate],
) -> Tensor:
    def product(
        codes: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None
    ) -> Tensor:
        total = multiply(codes, len(weight), lambda a, b: weight[a:b].to(torch.float32))
        return finish(total.mul_(weight_scale.flatten()), codes, scale, bias, out_dtype)

    def between(h: Tensor) -> tuple[Tensor, Tensor]:
        return quant_int8_per_token.reference(gated(h, **gate))

    up, down = (w13, w13_scale, b13), (w2, w2_scale, b2)
    return one_by_one(ids, weights, (x, x_scale), product, up, between, down)


@ops.moe_experts_w4a16.kernel("torch", refuses=refuse_gpus, syncs=True)
def moe_experts_w4a16(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: Tensor,
    w13_scale: Tensor,
    w2: Tensor,
    w2_scale: Tensor,
    w13_zeros: Tensor | None,
    w2_zeros: Tensor | None,
    b13: Tensor | None,
    b2: Tensor | None,
    group: int,
    **gate: Unpack[Gate],
) -> Tensor:
    def product(
        rows: Tensor, weight: Tensor, scale: Tensor, zeros: Tensor | None, bias: Tensor | None
    ) -> Tensor:
        def values(a: int, b: int) -> Tensor:
            part = None if zeros is None else zeros[a:b]
            return int4_weight(weight[a:b], scale[a:b], part, group)

        total = multiply(rows, len(weight), values)
        return finish(total, rows, None, bias, x.dtype)

    up, down = (w13, w13_scale, w13_zeros, b13), (w2, w2_scale, w2_zeros, b2)
    return one_by_one(ids, weights, (x,), product, up, lambda h: (gated(h, **gate),), down)


@ops.moe_experts_mxfp4.kernel("torch", refuses=refuse_gpus, syncs=True)
def moe_experts_mxfp4(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: Tensor,
    w13_scale: Tensor,
    w2: Tensor,
    w2_scale: Tensor,
    b13: Tensor | None,
    b2: Tensor | None,
    x_scale: Tensor | None,
    out_dtype: torch.dtype,
    **gate: Unpack[Gate],
) -> Tensor:
    def between(h: Tensor) -> tuple[Tensor]:
        return (mxfp4_operand(*requantized_mxfp4(gated(h, **gate), x.dtype, x_scale)),)

    def product(rows: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None) -> Tensor:
        total = multiply(
            rows, len(weight), lambda a, b: mxfp4_values(weight[a:b], weight_scale[a:b])
        )
        return finish(total, rows, None, bias, out_dtype)

    up, down = (w13, w13_scale, b13), (w2, w2_scale, b2)
    return one_by_one(ids, weights, (mxfp4_operand(x, x_scale),), product, up, between, down)
