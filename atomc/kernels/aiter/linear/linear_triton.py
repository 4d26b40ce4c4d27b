"""Linear layers by AITER's Triton kernels, over weights as they lie: in 8 and 4 bits, and in 16
bits with an fp32 result.
"""

from functools import partial
from typing import Unpack

import torch
from torch import Tensor

from atomc import ops
from atomc.kernels.aiter.library import (
    Function,
    dense_rows,
    foreign_operands,
    installed,
    no_mxfp4,
    product_of_rows,
    scattered,
    unfit,
)
from atomc.kernels.aiter.linear.scaled_linear import not_mxfp4
from atomc.kernels.checks import first_refusal, named, unlike
from atomc.kernels.row_views import as_rows
from atomc.ops.formats import HALVES
from atomc.ops.op import Refusal
from atomc.ops.scaled_linear import ScaledOperands
from atomc.platform import Platform

triton_gemm_a16w16 = Function(
    "gemm_a16w16", "aiter.ops.triton.gemm.basic.gemm_a16w16", "aiter.ops.triton.gemm_a16w16"
)
triton_gemm_a8w8 = Function(
    "gemm_a8w8", "aiter.ops.triton.gemm.basic.gemm_a8w8", "aiter.ops.triton.gemm_a8w8"
)
triton_gemm_a8w8_blockscale = Function(
    "gemm_a8w8_blockscale",
    "aiter.ops.triton.gemm.basic.gemm_a8w8_blockscale",
    "aiter.ops.triton.gemm_a8w8_blockscale",
)
triton_gemm_afp4wfp4 = Function(
    "gemm_afp4wfp4", "aiter.ops.triton.gemm.basic.gemm_afp4wfp4", "aiter.ops.triton.gemm_afp4wfp4"
)
# It came after the loads of MXFP4's scales that end with a row. Before, 256 inputs at a time are
# read, and what lies behind the last row may be a NaN.
joins_splits = Function(
    "_gemm_splitk_reduce_kernel", "aiter.ops.triton._triton_kernels.common.splitk_reduce"
)
AT_ONCE = 256


# Not gemm_a16w16 of aiter.tuned_gemm: for most shapes it rounds to 16 bits, and casts that to fp32.
@ops.linear_fp32.kernel(
    "aiter", refuses=first_refusal(installed(triton_gemm_a16w16), named("x weight", unlike, HALVES))
)
def linear_fp32(x: Tensor, weight: Tensor) -> Tensor:
    return product_of_rows(triton_gemm_a16w16, x, weight, dtype=torch.float32)


def _other_scales(x_scale: Tensor, weight_scale: Tensor) -> Refusal | None:
    if x_scale.dim() < 2 or weight_scale.dim() != 2:
        return Refusal(
            "argument", "AITER's Triton kernel takes a scale for each token and for each output"
        )
    return None


def _multiplied(
    x: Tensor,
    weight: Tensor,
    x_scale: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    scales = dense_rows(x_scale), weight_scale.contiguous()
    product = partial(triton_gemm_a8w8, bias=bias)
    return product_of_rows(product, x, weight, *scales, dtype=out_dtype)


@ops.scaled_linear_fp8.kernel(
    "aiter",
    refuses=first_refusal(
        installed(triton_gemm_a8w8), foreign_operands, _other_scales, named("bias", scattered)
    ),
)
def scaled_linear_fp8(**operands: Unpack[ScaledOperands]) -> Tensor:
    return _multiplied(**operands)


@ops.scaled_linear_int8.kernel(
    "aiter", refuses=first_refusal(installed(triton_gemm_a8w8), named("bias", scattered))
)
def scaled_linear_int8(**operands: Unpack[ScaledOperands]) -> Tensor:
    return _multiplied(**operands)


def _other_blocks(weight: Tensor, block: int) -> Refusal | None:
    if block != 128 or weight.shape[1] <= 64:
        return Refusal(
            "shape",
            f"blocks of {block} in rows of {weight.shape[1]}: AITER takes blocks of 128, and "
            "more than half of one",
        )
    return None


@ops.scaled_linear_fp8_block.kernel(
    "aiter",
    refuses=first_refusal(
        installed(triton_gemm_a8w8_blockscale),
        foreign_operands,
        _other_blocks,
    ),
)
def scaled_linear_fp8_block(
    x: Tensor,
    weight: Tensor,
    x_scale: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    return product_of_rows(
        triton_gemm_a8w8_blockscale,
        x,
        weight,
        as_rows(x_scale),
        weight_scale,
        dtype=out_dtype,
        bias=bias,
    )


def _past_the_end(platform: Platform, weight: Tensor) -> Refusal | None:
    width = 2 * weight.shape[1]
    if width % AT_ONCE and unfit(platform, joins_splits):
        return Refusal(
            "shape",
            f"rows of {width}: this AITER reads scales of {AT_ONCE} at a time, past the end of "
            "the last row",
        )
    return None


@ops.linear_mxfp4.kernel(
    "aiter",
    refuses=first_refusal(
        installed(triton_gemm_afp4wfp4),
        no_mxfp4,
        not_mxfp4,
        _past_the_end,
    ),
)
def linear_mxfp4(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    x_scale: Tensor | None,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    assert x_scale is not None
    return product_of_rows(
        triton_gemm_afp4wfp4,
        x,
        weight,
        as_rows(x_scale),
        weight_scale,
        dtype=out_dtype,
        bias=bias,
    )
