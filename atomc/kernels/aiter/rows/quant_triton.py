"""Quantizers by AITER's Triton kernels: where its compiled ones are missing or refuse.

Not the one by row, which makes NaN of a row of zeros, and not the static one, which cuts nothing
off.
"""

import torch
from torch import Tensor

from atomc import ops
from atomc.kernels.aiter.library import Function, foreign_codes, installed, rounded_up
from atomc.kernels.checks import first_refusal, odd_group
from atomc.kernels.row_views import as_rows, with_lead

QUANT = ("aiter.ops.triton.quant.quant", "aiter.ops.triton.quant")
dynamic_mxfp4_quant = Function("dynamic_mxfp4_quant", *QUANT)
fused_flatten_fp8_group_quant = Function(
    "fused_flatten_fp8_group_quant",
    "aiter.ops.triton.quant.fused_fp8_quant",
    "aiter.ops.triton.fused_fp8_quant",
    takes=["dtype_quant"],
)


@ops.quant_fp8_group.kernel(
    "aiter",
    refuses=first_refusal(installed(fused_flatten_fp8_group_quant), foreign_codes, odd_group),
)
def quant_fp8_group(
    x: Tensor, group: int, column_major_scales: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    if not x.numel():
        return ops.quant_fp8_group.reference(x, group, column_major_scales, dtype)
    codes, scales = fused_flatten_fp8_group_quant(as_rows(x).unsqueeze(1), group, dtype_quant=dtype)
    if column_major_scales:
        scales = scales.t().contiguous().t()
    return codes.view(x.shape), with_lead(scales, x)


refuse_quant_mxfp4 = first_refusal(installed(dynamic_mxfp4_quant), rounded_up)


@ops.quant_mxfp4.kernel("aiter", refuses=refuse_quant_mxfp4)
def quant_mxfp4(x: Tensor, rounding: str) -> tuple[Tensor, Tensor]:
    if not x.numel():
        return ops.quant_mxfp4.reference(x, rounding)
    codes, scales = dynamic_mxfp4_quant(as_rows(x))
    return with_lead(codes, x), with_lead(scales.contiguous(), x)
