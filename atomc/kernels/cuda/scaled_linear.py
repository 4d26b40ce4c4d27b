"""Linear layers in fp8 by cuBLAS and CUTLASS, through torch._scaled_mm, with one scale per tensor
or per row.
"""

import torch
from torch import Tensor

from atomc import ops
from atomc.kernels.checks import (
    FP8_MULTIPLIED,
    first_refusal,
    named,
    older_than,
    unlike,
    wrong_result,
)
from atomc.kernels.row_views import with_lead
from atomc.ops.formats import HALVES
from atomc.ops.op import Refusal
from atomc.platform import Platform

# From this number of rows on, sums have the precision of the tensor core. H200: the layers of
# Qwen3-8B take 7% less time for 65,536 rows; the error of a row of 12,288 is 3.1e-3 instead of
# 1.7e-3, the rounding of the result, while rounding its values to fp8 costs 2.6e-2.
FAST_ROWS = 256


def _odd_weight(weight: Tensor) -> Refusal | None:
    n, k = weight.shape
    return (
        Refusal("shape", f"a weight of {n} x {k}: cuBLAS takes multiples of 16")
        if n % 16 or k % 16
        else None
    )


def _scaled_by_row(
    platform: Platform, x_scale: Tensor, weight_scale: Tensor, out_dtype: torch.dtype
) -> Refusal | None:
    of_all = x_scale.dim() <= 1 and weight_scale.dim() <= 1
    if of_all or out_dtype == torch.bfloat16 or platform.capability == (9, 0):
        return None
    return Refusal(
        "dtype",
        f"the result is {out_dtype}: with a scale per row, {platform.arch} supports only bfloat16",
    )


def _scattered(weight: Tensor) -> Refusal | None:
    if weight.stride(1) == 1 and weight.stride(0) == weight.shape[1]:
        return None
    return Refusal("layout", "the weight is not contiguous")


refuse_scaled_linear_fp8 = first_refusal(
    lambda platform: older_than(FP8_MULTIPLIED, platform, "fp8 products of cuBLAS run"),
    named("x weight", unlike, (torch.float8_e4m3fn,)),
    _odd_weight,
    named("out_dtype", wrong_result, HALVES),  # sums of fp8 products are too inexact for fp32
    _scaled_by_row,
    lambda bias, out_dtype: unlike((out_dtype,), bias=bias),
    _scattered,
)


@ops.scaled_linear_fp8.kernel("cuda", refuses=refuse_scaled_linear_fp8)
def scaled_linear_fp8(
    x: Tensor,
    weight: Tensor,
    x_scale: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    n, k = weight.shape
    if not x.numel():
        return x.new_empty((*x.shape[:-1], n), dtype=out_dtype)
    rows = x.reshape(-1, k)
    if x_scale.numel() > 1 or weight_scale.numel() > 1:
        # Both have one scale per row, or both one scale.
        x_scale = x_scale.reshape(-1, 1).expand(len(rows), 1).contiguous()
        weight_scale = weight_scale.reshape(1, -1).expand(1, n).contiguous()
    out = torch._scaled_mm(
        rows,
        weight.t(),
        x_scale,
        weight_scale,
        bias=bias,
        out_dtype=out_dtype,
        use_fast_accum=len(rows) >= FAST_ROWS,
    )
    return with_lead(out, x)
