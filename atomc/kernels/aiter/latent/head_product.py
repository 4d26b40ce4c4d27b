"""Products by head with a quantized half of kv_b_proj by AITER's Triton kernels, which quantize the
left side in registers.
"""

import torch
from torch import Tensor

from atomc import ops
from atomc.kernels.aiter.library import Function, foreign_fp8, no_mxfp4, rounded_up, unfit
from atomc.kernels.checks import odd_group, unlike
from atomc.kernels.row_views import as_heads
from atomc.ops.formats import HALVES
from atomc.ops.op import Refusal
from atomc.platform import Platform

_BATCHED = "batched_gemm_a8w8_a_per_token_group_prequant_w_per_batched_tensor_quant"
batched_gemm_a8w8 = Function(
    _BATCHED,
    f"aiter.ops.triton.gemm.batched.{_BATCHED}",
    f"aiter.ops.triton.{_BATCHED}",
    takes=["transpose_bm", "transpose_bm_in"],
)
batched_gemm_a16wfp4 = Function(
    "batched_gemm_a16wfp4",
    "aiter.ops.triton.gemm.batched.batched_gemm_a16wfp4",
    takes=["transpose_bm", "prequant"],
)


def refuse_product(
    platform: Platform,
    x: Tensor,
    weight: Tensor,
    scheme: str,
    group: int,
    dtype: torch.dtype,
    rounding: str,
) -> Refusal | None:
    """Why `quantized_linear_by_head` does not serve these."""
    if reason := unfit(platform, batched_gemm_a8w8 if scheme == "fp8" else batched_gemm_a16wfp4):
        return reason
    if scheme == "fp8":
        reason = foreign_fp8(platform, weight.dtype, dtype) or odd_group(group)
    else:
        reason = no_mxfp4(platform) or rounded_up(rounding)
    return reason or unlike(HALVES, x=x)


@ops.quantized_linear_by_head.kernel("aiter", refuses=refuse_product)
def quantized_linear_by_head(
    x: Tensor, weight: Tensor, weight_scale: Tensor, scheme: str, group: int
) -> Tensor:
    rows = as_heads(x)
    out: Tensor = x.new_empty((*rows.shape[:-1], weight.shape[1]))
    if rows.numel() and scheme == "fp8":
        out = batched_gemm_a8w8(
            rows,
            weight,
            weight_scale,
            group,
            dtype=x.dtype,
            transpose_bm=True,
            transpose_bm_in=True,
        )
    elif rows.numel():
        out = batched_gemm_a16wfp4(
            rows.transpose(0, 1),
            weight,
            weight_scale,
            x.dtype,
            out,
            transpose_bm=True,
            prequant=True,
        )
    return out.view(*x.shape[:-1], weight.shape[1])
