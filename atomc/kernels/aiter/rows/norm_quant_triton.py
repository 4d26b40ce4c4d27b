"""Norms whose result AITER's Triton kernels quantize: static fp8, fp8 in groups, MXFP4 whose scales
are rounded to even.

Static fp8 rounds the norm to the model's dtype before it is quantized, as the meaning does; the
others keep it in fp32.
"""

from typing import Unpack

import torch
from torch import Tensor

from atomc import ops
from atomc.kernels.aiter.library import Function, foreign_fp8, rounded_up, unfit
from atomc.kernels.aiter.rows.norm_triton import unreadable
from atomc.kernels.checks import odd_group
from atomc.kernels.row_views import as_rows, with_lead
from atomc.ops.norm_quant import QuantizedNorm
from atomc.ops.op import Refusal
from atomc.platform import Platform

FP8 = ("aiter.ops.triton.quant.fused_fp8_quant", "aiter.ops.triton.fused_fp8_quant")
fused_rms_fp8_per_tensor_static_quant = Function(
    "fused_rms_fp8_per_tensor_static_quant",
    *FP8,
    takes=["dtype_quant", "res1", "output_unquantized_inp1", "rmsnorm_convert_to_inp1_type"],
)
fused_rms_fp8_group_quant = Function(
    "fused_rms_fp8_group_quant",
    *FP8,
    takes=["group_size", "dtype_quant", "res1", "output_unquantized_inp1", "transpose_scale"],
)
fused_rms_mxfp4_quant = Function(
    "fused_rms_mxfp4_quant",
    "aiter.ops.triton.quant.fused_mxfp4_quant",
    "aiter.ops.triton.fused_mxfp4_quant",
    takes=["res1", "shuffle", "output_unquantized_inp1"],
)
FUNCTIONS = {
    "fp8_static": fused_rms_fp8_per_tensor_static_quant,
    "fp8_group": fused_rms_fp8_group_quant,
    "mxfp4": fused_rms_mxfp4_quant,
}


def _refuse(
    platform: Platform,
    x: Tensor,
    weight: Tensor,
    style: str,
    scheme: str,
    dtype: torch.dtype,
    group: int,
    rounding: str,
    residual: Tensor | None = None,
) -> Refusal | None:
    if scheme not in FUNCTIONS:
        return Refusal("argument", f"AITER has no Triton norm that quantizes as {scheme}")
    if reason := unfit(platform, FUNCTIONS[scheme]) or unreadable(x, residual, weight, style):
        return reason
    if scheme == "mxfp4":
        return rounded_up(rounding)
    if scheme == "fp8_group" and (reason := odd_group(group)):
        return reason
    return foreign_fp8(platform, dtype)


def _quantized(
    x: Tensor, residual: Tensor | None, **norm: Unpack[QuantizedNorm]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes, scales, the sum, which is x without a residual, and the norm."""
    if not x.numel():
        added = x if residual is None else residual
        return ops.add_rms_norm_quant.reference(x, added, **norm)
    scheme, dtype, keep = norm["scheme"], norm["dtype"], norm["keep"]
    operands = as_rows(x), norm["weight"], norm["eps"]
    other = None if residual is None else as_rows(residual)
    extra = {"res1": other, "output_unquantized_inp1": keep}
    if scheme == "fp8_static":
        codes, y, _, total = fused_rms_fp8_per_tensor_static_quant(
            *operands,
            norm["scale"],
            dtype_quant=dtype,
            rmsnorm_convert_to_inp1_type=True,
            **extra,
        )
        scales = x.new_empty(0, dtype=torch.float32)
    elif scheme == "fp8_group":
        (codes, scales), y, _, total = fused_rms_fp8_group_quant(
            *operands,
            group_size=norm["group"],
            dtype_quant=dtype,
            transpose_scale=norm["column_major"],
            **extra,
        )
        if norm["column_major"]:
            # It comes with the shape of rows over the bytes of columns.
            scales = scales.view(scales.shape[1], scales.shape[0]).t()
    else:
        (codes, scales), y, _, total = fused_rms_mxfp4_quant(*operands, shuffle=False, **extra)
    return (
        with_lead(codes, x),
        with_lead(scales, x) if scales.dim() > 1 else scales,
        x if total is None else total.view(x.shape),
        y.view(x.shape) if keep else x.new_empty(0),
    )


@ops.rms_norm_quant.kernel("aiter", refuses=_refuse, rounds="once")
def rms_norm_quant(x: Tensor, **norm: Unpack[QuantizedNorm]) -> tuple[Tensor, Tensor, Tensor]:
    codes, scales, _, y = _quantized(x, None, **norm)
    return codes, scales, y


@ops.add_rms_norm_quant.kernel("aiter", refuses=_refuse, rounds="once")
def add_rms_norm_quant(
    x: Tensor, residual: Tensor, **norm: Unpack[QuantizedNorm]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _quantized(x, residual, **norm)
