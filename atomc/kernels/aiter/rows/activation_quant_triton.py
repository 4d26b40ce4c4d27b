"""SiLU * up whose product AITER quantizes: fp8 static and in groups, and MXFP4 whose scales are
rounded to even, in Triton.

Static fp8 rounds the product to the model's dtype before it is quantized, once; the others keep it
in fp32.
"""

from typing import Unpack

import torch
from torch import Tensor

from atomc import ops
from atomc.kernels.aiter.library import (
    Function,
    foreign_fp8,
    refuse_column_major,
    rounded_up,
    side_by_side,
    unfit,
)
from atomc.kernels.aiter.rows.activation import apart
from atomc.kernels.checks import odd_group
from atomc.kernels.row_views import with_lead
from atomc.ops.op import Refusal
from atomc.ops.schemes import SchemeArguments
from atomc.platform import Platform

FP8 = ("aiter.ops.triton.quant.fused_fp8_quant", "aiter.ops.triton.fused_fp8_quant")
fused_silu_mul_fp8_per_tensor_static_quant = Function(
    "fused_silu_mul_fp8_per_tensor_static_quant",
    *FP8,
    takes=["dtype_quant", "silu_convert_to_inp_type"],
)
act_mul_and_fp8_group_quant = Function(
    "act_mul_and_fp8_group_quant", "aiter.ops.triton.activation", takes=["dtype_quant"]
)
fused_reduce_act_mul_and_mxfp4_quant = Function(
    "fused_reduce_act_mul_and_mxfp4_quant",
    "aiter.ops.triton.quant.fused_mxfp4_quant",
    "aiter.ops.triton.fused_mxfp4_quant",
    takes=["shuffle"],
)
FUNCTIONS = {
    "fp8_static": fused_silu_mul_fp8_per_tensor_static_quant,
    "fp8_group": act_mul_and_fp8_group_quant,
    "mxfp4": fused_reduce_act_mul_and_mxfp4_quant,
}


def _refuse(
    platform: Platform,
    gate: Tensor,
    up: Tensor,
    scheme: str,
    dtype: torch.dtype,
    group: int,
    column_major: bool,
    rounding: str,
) -> Refusal | None:
    if scheme not in FUNCTIONS:
        return Refusal("argument", f"AITER has no activation that quantizes as {scheme}")
    if reason := unfit(platform, FUNCTIONS[scheme]) or apart(gate, up):
        return reason
    if scheme == "mxfp4":
        return rounded_up(rounding)
    if scheme == "fp8_group" and (reason := refuse_column_major(column_major) or odd_group(group)):
        return reason
    return foreign_fp8(platform, dtype)


@ops.silu_and_mul_quant.kernel("aiter", refuses=_refuse, rounds="once")
def silu_and_mul_quant(
    gate: Tensor, up: Tensor, scale: Tensor | None, **how: Unpack[SchemeArguments]
) -> tuple[Tensor, Tensor]:
    if not gate.numel():
        return ops.silu_and_mul_quant.reference(gate, up, scale, **how)
    scheme, dtype, packed = how["scheme"], how["dtype"], side_by_side(gate, up)
    if scheme == "fp8_static":
        codes = fused_silu_mul_fp8_per_tensor_static_quant(
            packed, scale, dtype_quant=dtype, silu_convert_to_inp_type=True
        )
        return codes.view(gate.shape), gate.new_empty(0, dtype=torch.float32)
    if scheme == "fp8_group":
        codes, scales = act_mul_and_fp8_group_quant(packed, "silu", how["group"], dtype_quant=dtype)
    else:
        (codes, scales), _ = fused_reduce_act_mul_and_mxfp4_quant(packed, "silu", shuffle=False)
    return with_lead(codes, gate), with_lead(scales, gate)
