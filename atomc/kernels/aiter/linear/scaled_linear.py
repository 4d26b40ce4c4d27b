"""Linear layers in 8 and 4 bits by AITER's compiled products (CK, hipBLASLt, assembly).

Some want the weight in tiles that a wave reads as they lie (packing): a copy, made once. A bias is
added behind them.
"""

from typing import Unpack

import torch
from torch import Tensor

from atomc import ops
from atomc.kernels.aiter.library import (
    Function,
    dense_rows,
    foreign_operands,
    gapped,
    installed,
    no_mxfp4,
    plus,
    product_of_rows,
    scattered,
)
from atomc.kernels.aiter.linear.linear import gemm_a16w16
from atomc.kernels.aiter.linear.packing import (
    e2m1_view,
    e8m0_view,
    relaid_scale,
    relaid_weight,
    shuffled_scale,
)
from atomc.kernels.checks import first_refusal, named, uneven, wrong_result
from atomc.kernels.row_views import as_rows, with_lead
from atomc.ops.formats import HALVES
from atomc.ops.op import Refusal
from atomc.ops.scaled_linear import ScaledOperands

gemm_a8w8 = Function("gemm_a8w8", "aiter")
gemm_a8w8_bpreshuffle = Function("gemm_a8w8_bpreshuffle", "aiter")
gemm_a8w8_blockscale = Function("gemm_a8w8_blockscale", "aiter")
gemm_a8w8_blockscale_bpreshuffle = Function("gemm_a8w8_blockscale_bpreshuffle", "aiter")
gemm_a4w4 = Function("gemm_a4w4", "aiter", takes=["dtype", "bpreshuffle"])
# The inputs that the assembly of gemm_a4w4 reads at a time.
AT_ONCE = 256


def unmultiplied(weight: Tensor, out_dtype: torch.dtype) -> Refusal | None:
    """What AITER's products in few bits have in common, and do not take."""
    if reason := wrong_result(HALVES, out_dtype):
        return reason
    n, k = weight.shape
    if n % 16 or k % 16:
        return Refusal("shape", f"a weight of {n} x {k}: AITER takes multiples of 16")
    return None


def _multiplied(
    function: Function,
    x: Tensor,
    weight: Tensor,
    x_scale: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    x, x_scale = x.contiguous(), dense_rows(x_scale)
    return product_of_rows(function, x, weight, x_scale, weight_scale, dtype=out_dtype, bias=bias)


def _scaled_by_row(x_scale: Tensor, weight_scale: Tensor) -> Refusal | None:
    if x_scale.dim() != 1 or weight_scale.dim() != 1:
        return Refusal("argument", "AITER's tuned products take one scale a tensor")
    return None


@ops.scaled_linear_fp8.kernel(
    "aiter",
    refuses=first_refusal(
        installed(gemm_a16w16),
        foreign_operands,
        _scaled_by_row,
        unmultiplied,
    ),
)
def scaled_linear_fp8(
    x: Tensor,
    weight: Tensor,
    x_scale: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    if not x.numel():
        return x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=out_dtype)
    out: Tensor = gemm_a16w16(
        dense_rows(x), weight, otype=out_dtype, scale_a=x_scale, scale_b=weight_scale
    )
    return plus(with_lead(out, x), bias)


def _other_blocks(weight: Tensor, x_scale: Tensor, block: int) -> Refusal | None:
    if block != 128 or weight.shape[1] % 128:
        return Refusal(
            "shape",
            f"blocks of {block} in rows of {weight.shape[1]}: AITER takes whole blocks of 128",
        )
    if scattered(x_scale=x_scale):
        return Refusal("layout", "AITER's kernel reads the scales row by row")
    return None


@ops.scaled_linear_fp8_block.kernel(
    "aiter",
    refuses=first_refusal(
        installed(gemm_a8w8_blockscale),
        foreign_operands,
        unmultiplied,
        _other_blocks,
        named("weight", scattered),
        named("weight_scale", gapped),
    ),
)
def scaled_linear_fp8_block(**operands: Unpack[ScaledOperands]) -> Tensor:
    return _multiplied(gemm_a8w8_blockscale, **operands)


@ops.scaled_linear_int8.kernel(
    "aiter",
    refuses=first_refusal(installed(gemm_a8w8), unmultiplied, named("weight weight_scale", gapped)),
)
def scaled_linear_int8(**operands: Unpack[ScaledOperands]) -> Tensor:
    return _multiplied(gemm_a8w8, **operands)


def not_mxfp4(x: Tensor) -> Refusal | None:
    if x.dtype == torch.uint8:
        return None
    return Refusal("dtype", f"AITER's kernel multiplies MXFP4 by MXFP4, here x is {x.dtype}")


@ops.linear_mxfp4.kernel(
    "aiter",
    refuses=first_refusal(
        installed(gemm_a4w4),
        no_mxfp4,
        not_mxfp4,
        named("out_dtype", wrong_result, (torch.bfloat16,)),
        unmultiplied,
        lambda weight: uneven(2 * weight.shape[1], AT_ONCE),
    ),
    prepare={"weight": relaid_weight, "weight_scale": relaid_scale},
)
def linear_mxfp4(
    x: Tensor,
    weight: tuple[Tensor],
    weight_scale: tuple[Tensor],
    x_scale: Tensor | None,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    [tiles], [scale_tiles] = weight, weight_scale
    if not x.numel():
        return x.new_empty((*x.shape[:-1], tiles.shape[0]), dtype=out_dtype)
    assert x_scale is not None
    out: Tensor = gemm_a4w4(
        e2m1_view(dense_rows(x)),
        e2m1_view(tiles),
        e8m0_view(shuffled_scale(as_rows(x_scale))),
        e8m0_view(scale_tiles),
        dtype=out_dtype,
        bpreshuffle=True,
    )
    return plus(with_lead(out, x), bias)
