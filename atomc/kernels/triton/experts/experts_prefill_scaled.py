"""Experts with weights in fp8 or int8 for many tokens, in Triton: the products are those of codes,
and the gated activation is quantized between them.
"""

from typing import Unpack

import torch
from torch import Tensor

from atomc import ops
from atomc.kernels.checks import first_refusal, no_fp8_products, strided, unlike, wrong_result
from atomc.kernels.triton.experts.expert_checks import unfit, unreadable
from atomc.kernels.triton.experts.experts_prefill import sum_of_experts
from atomc.kernels.triton.launch.tiles import MOE_EXPERTS_8_BITS
from atomc.kernels.triton.rows.quant import (
    quant_fp8_group,
    quant_fp8_per_token,
    quant_fp8_static,
    quant_int8_per_token,
)
from atomc.ops.formats import FLOATS, HALVES
from atomc.ops.op import Refusal
from atomc.ops.scaled_experts import EightBitExpertOperands
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
    act_scale: Tensor | None, block: int, **operands: Unpack[EightBitExpertOperands]
) -> Tensor:
    dtype = operands["x"].dtype

    def quantize(act: Tensor) -> tuple[Tensor, Tensor]:
        if block:
            return quant_fp8_group(act, block, dtype=dtype)
        if act_scale is None:
            return quant_fp8_per_token(act, dtype)
        return quant_fp8_static(act, act_scale, dtype), act_scale

    return sum_of_experts(MOE_EXPERTS_8_BITS, quantize, square=block, **operands)


@ops.moe_experts_int8.kernel(
    "triton", refuses=refuse_moe_experts_fp8, tuned_for=MOE_EXPERTS_8_BITS.archs
)
def moe_experts_int8(**operands: Unpack[EightBitExpertOperands]) -> Tensor:
    return sum_of_experts(MOE_EXPERTS_8_BITS, quant_int8_per_token, **operands)
