"""Sums over processes with the norm that follows and a quantized result: AITER's kernel for the sum
and the norm, then its quantizer.
"""

import torch
from torch import Tensor

from atomc import ops
from atomc.kernels.aiter.collective.collective import (
    allreduce_add_rms_norm,
    refuse_allreduce_add_rms_norm,
)
from atomc.kernels.aiter.rows import quant
from atomc.kernels.checks import first_refusal
from atomc.ops.op import Refusal
from atomc.platform import Platform


def _refuse_quantizer(
    platform: Platform,
    x: Tensor,
    scale: Tensor | None,
    scheme: str,
    dtype: torch.dtype,
    group: int,
    rounding: str,
) -> Refusal | None:
    if scheme == "fp8_static" and scale is not None:
        return quant.refuse_static(platform, x, dtype)
    if scheme == "fp8_per_token":
        return quant.refuse_per_token(platform, x, dtype)
    if scheme == "fp8_group":
        return quant.refuse_group(platform, x, group, dtype)
    if scheme == "mxfp4":
        return quant.refuse_mxfp4(platform, x, rounding)
    return Refusal(
        "argument", "AITER's compiled quantizer truncates to int8, where the op rounds to nearest"
    )


@ops.allreduce_add_rms_norm_quant.kernel(
    "aiter",
    refuses=first_refusal(refuse_allreduce_add_rms_norm, _refuse_quantizer),
    rounds="once",
)
def allreduce_add_rms_norm_quant(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    process_group: str,
    scale: Tensor | None,
    style: str,
    scheme: str,
    dtype: torch.dtype,
    group: int,
    column_major: bool,
    rounding: str,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    y, total = allreduce_add_rms_norm(x, residual, weight, eps, process_group, style)
    if scheme == "fp8_static":
        assert scale is not None
        codes, scales = quant.quant_fp8_static(y, scale, dtype), x.new_empty(0, dtype=torch.float32)
    elif scheme == "fp8_per_token":
        codes, scales = quant.quant_fp8_per_token(y, dtype)
    elif scheme == "fp8_group":
        codes, scales = quant.quant_fp8_group(y, group, column_major, dtype)
    else:
        codes, scales = quant.quant_mxfp4(y, rounding)
    return codes, scales, total, y if keep else y.new_empty(0)
