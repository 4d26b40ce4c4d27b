"""Keys and values of all heads from the latent by AITER's Triton kernels: a product in fp8 by
blocks or in MXFP4, whose result is split and joined to the rotated keys.
"""

import torch
from torch import Tensor

from atomc import ops
from atomc.kernels.aiter.library import Function, foreign_operands, no_mxfp4, unfit
from atomc.kernels.aiter.linear.linear_shuffled_split_cat import FUSED, other_keys, split_cat
from atomc.kernels.aiter.linear.linear_shuffled_split_cat_mxfp4 import AT_ONCE
from atomc.ops.op import Refusal
from atomc.platform import Platform

fused_gemm_a8w8_blockscale_split_cat = Function(
    "fused_gemm_a8w8_blockscale_split_cat", f"{FUSED}fused_gemm_a8w8_blockscale_split_cat"
)
fused_gemm_afp4wfp4_split_cat = Function(
    "fused_gemm_afp4wfp4_split_cat", f"{FUSED}fused_gemm_afp4wfp4_split_cat"
)
FUNCTIONS = {
    "fp8_block": fused_gemm_a8w8_blockscale_split_cat,
    "mxfp4": fused_gemm_afp4wfp4_split_cat,
}


def _refuse(
    platform: Platform,
    x: Tensor,
    weight: Tensor,
    k_pe: Tensor,
    scheme: str,
    out_dtype: torch.dtype,
) -> Refusal | None:
    if scheme not in FUNCTIONS:
        return Refusal("argument", f"AITER splits no product in {scheme}")
    if reason := unfit(platform, FUNCTIONS[scheme]) or other_keys(k_pe, out_dtype):
        return reason
    if scheme == "mxfp4":
        width = 2 * weight.shape[1]
        if width % AT_ONCE and width & (width - 1):
            return Refusal(
                "shape",
                f"rows of {width}: AITER reads scales of {AT_ONCE} at a time, past the end of "
                "the last row",
            )
        return no_mxfp4(platform)
    if weight.shape[1] <= 64:
        return Refusal(
            "shape",
            f"rows of {weight.shape[1]}: AITER takes blocks of 128, and more than half of one",
        )
    return foreign_operands(platform, x, weight)


@ops.linear_split_cat.kernel("aiter", refuses=_refuse)
def linear_split_cat(
    x: Tensor,
    weight: Tensor,
    x_scale: Tensor,
    weight_scale: Tensor,
    k_pe: Tensor,
    nope: int,
    scheme: str,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    operands = x, weight, x_scale, weight_scale
    return split_cat(FUNCTIONS[scheme], operands, k_pe, nope, weight.shape[0], out_dtype)
