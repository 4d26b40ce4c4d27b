"""Experts with weights in fp8 or int8 for many tokens, in Triton: the products are those of codes,
and the gated activation is quantized between them.
"""

from typing import Unpack

import torch
from torch import Tensor

from atomc import ops
from atomc.kernels.checks import (
    first_refusal,
    no_fp8_products,
    strided,
    unlike,
    wrong_result,
)
from atomc.kernels.triton.experts.expert_checks import unfit, unreadable
from atomc.kernels.triton.experts.expert_gate import GateConstants
from atomc.kernels.triton.experts.experts_prefill import sum_of_experts
from atomc.kernels.triton.launch.tiles import MOE_EXPERTS_8_BITS
from atomc.kernels.triton.rows.quant import (
    quant_fp8_group,
    quant_fp8_per_token,
    quant_fp8_static,
    quant_int8_per_token,
)
from atomc.ops.experts import Gate
from atomc.ops.formats import FLOATS, HALVES
from atomc.ops.op import Refusal
from atomc.platform import Platform

BLOCK = 128


def refuse_types(
    platform: Platform, x: Tensor, w13: Tensor, w2: Tensor, out_dtype: torch.dtype
) -> Refusal | None:
    """Refuse operands that are not all fp8, or all int8, with rows that are contiguous."""
    return (
        unlike((torch.float8_e4m3fn, torch.int8), x=x, w13=w13, w2=w2)
        or no_fp8_products(platform, x.dtype)
        # Sums of fp8 products are too inexact for fp32 results.
        or wrong_result(HALVES if x.dtype == torch.float8_e4m3fn else FLOATS, out_dtype)
        or strided(x=x, w13=w13, w2=w2)
    )


def refuse_block(block: int = 0) -> Refusal | None:
    if block in (0, BLOCK):
        return None
    return Refusal("shape", f"blocks of {block}: written for {BLOCK}")


refuse_moe_experts_fp8 = first_refusal(unfit, refuse_types, unreadable, refuse_block)


@ops.moe_experts_fp8.kernel(
    "triton", refuses=refuse_moe_experts_fp8, tuned_for=MOE_EXPERTS_8_BITS.archs
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
    b13: Tensor | None,
    b2: Tensor | None,
    act_scale: Tensor | None,
    out_dtype: torch.dtype,
    block: int,
    **gate: Unpack[Gate],
) -> Tensor:
    def quantize(act: Tensor) -> tuple[Tensor, Tensor]:
        if block:
            return quant_fp8_group(act, block, dtype=x.dtype)
        if act_scale is None:
            return quant_fp8_per_token(act, x.dtype)
        return quant_fp8_static(act, act_scale, x.dtype), act_scale

    return sum_of_experts(
        MOE_EXPERTS_8_BITS,
        x,
        x_scale,
        ids,
        weights,
        (w13, w13_scale, b13),
        (w2, w2_scale, b2),
        quantize,
        out_dtype,
        GateConstants(**gate),
        block,
    )


@ops.moe_experts_int8.kernel(
    "triton", refuses=refuse_moe_experts_fp8, tuned_for=MOE_EXPERTS_8_BITS.archs
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
    b13: Tensor | None,
    b2: Tensor | None,
    out_dtype: torch.dtype,
    **gate: Unpack[Gate],
) -> Tensor:
    return sum_of_experts(
        MOE_EXPERTS_8_BITS,
        x,
        x_scale,
        ids,
        weights,
        (w13, w13_scale, b13),
        (w2, w2_scale, b2),
        quant_int8_per_token,
        out_dtype,
        GateConstants(**gate),
    )
