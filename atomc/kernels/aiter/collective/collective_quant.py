"""Sums over processes with the norm that follows and a quantized result, in one kernel of AITER:
fp8 per token and in groups of 128, MXFP4 with scales rounded to even.

The norm stays in fp32 until it is quantized. AITER itself takes several kernels for steps that are
too large for this one.
"""

from typing import Unpack

import torch
from torch import Tensor

from atomc import ops
from atomc.kernels.aiter.collective.collective import (
    refuse_allreduce_add_rms_norm,
    refuse_other_gpus,
)
from atomc.kernels.aiter.library import Function, dense_rows, foreign_fp8, installed, rounded_up
from atomc.kernels.checks import first_refusal, too_wide, uneven
from atomc.kernels.row_views import with_lead
from atomc.ops.norm_quant import QuantizedNorm
from atomc.ops.op import Refusal
from atomc.platform import Platform

tensor_model_parallel_fused_allreduce_rmsnorm_quant = Function(
    "tensor_model_parallel_fused_allreduce_rmsnorm_quant",
    "aiter.dist.communication_op",
    takes=["quant_type", "emit_bf16", "transpose_scale", "gemma_norm"],
)

# Scheme -> AITER's name of it.
QUANT_TYPES = {"fp8_per_token": "per_token", "fp8_group": "per_group", "mxfp4": "mxfp4"}
GROUP = 128
# A block has a thread for each 8 columns: in groups of fp8 it adds up whole warps of 32, for MXFP4
# it has up to 1024.
WARP_COLUMNS, WIDEST = 256, 8192


def _refuse_scheme(
    platform: Platform,
    weight: Tensor,
    style: str,
    scheme: str,
    dtype: torch.dtype,
    group: int,
    rounding: str,
) -> Refusal | None:
    if scheme not in QUANT_TYPES:
        return Refusal("argument", f"AITER has no sum that quantizes as {scheme}")
    if scheme != "fp8_per_token" and style == "one_plus":
        return Refusal("argument", f"AITER's sum as {scheme} does not add 1 to the weight")
    if scheme == "mxfp4":
        return rounded_up(rounding) or too_wide(weight.shape[-1], WIDEST)
    if scheme == "fp8_group" and group != GROUP:
        return Refusal("shape", f"groups of {group}: AITER's sum quantizes groups of {GROUP}")
    if scheme == "fp8_group" and (reason := uneven(weight.shape[-1], WARP_COLUMNS)):
        return reason
    return foreign_fp8(platform, dtype)


@ops.allreduce_add_rms_norm_quant.kernel(
    "aiter",
    refuses=first_refusal(
        installed(tensor_model_parallel_fused_allreduce_rmsnorm_quant),
        refuse_allreduce_add_rms_norm,
        refuse_other_gpus,
        _refuse_scheme,
    ),
    rounds="once",
)
def allreduce_add_rms_norm_quant(
    x: Tensor, residual: Tensor, **norm: Unpack[QuantizedNorm]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    scheme, keep = norm["scheme"], norm["keep"]
    codes, total, scales, *normed = tensor_model_parallel_fused_allreduce_rmsnorm_quant(
        dense_rows(x),
        dense_rows(residual),
        norm["weight"],
        norm["eps"],
        quant_type=QUANT_TYPES[scheme],
        emit_bf16=keep,
        transpose_scale=norm["column_major"],
        gemma_norm=norm["style"] == "one_plus",
    )
    if scheme == "mxfp4":
        scales = scales.contiguous()  # of large steps it writes them column by column
    y = normed[0].view(x.shape) if keep else x.new_empty(0)
    return with_lead(codes, x), with_lead(scales, x), total.view(x.shape), y
