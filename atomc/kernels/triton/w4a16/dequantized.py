"""Linear layers of many rows with 4-bit weights: each call unpacks the weight to 16 bits and calls
cuBLAS. From 65 rows on this costs less than unpacking each tile whenever it is read.

int4 values times their scales, and those of NVFP4, are rounded to 16 bits; e2m1 times a power of
two is exact in bf16.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from atomc import ops
from atomc.kernels.checks import first_refusal, named, unlike, wrong_result
from atomc.kernels.triton.w4a16.unpacking import (
    MAX_ROWS,
    code_words,
    other_group,
    scale_of,
    unfit,
    unpacked,
    zero_of,
)
from atomc.ops.formats import HALVES, NVFP4_GROUP
from atomc.ops.op import Refusal

MANY = ops.Tokens(MAX_ROWS + 1)


@triton.jit(do_not_specialize=["rows"])
def _unpack(
    words_ptr,
    scale_ptr,
    zeros_ptr,
    global_ptr,
    out_ptr,
    rows,
    W: constexpr,
    GROUP: constexpr,
    INT4: constexpr,
    ROWS: constexpr,
    BLOCK: constexpr,
):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]).to(tl.int64)
    word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (word < W)
    words = tl.load(words_ptr + row * W + word, inside, 0)
    at = row * (W * 8 // GROUP) + word // (GROUP // 8)
    scale, zero = scale_of(scale_ptr, at, inside, INT4), zero_of(zeros_ptr, at, inside)
    if global_ptr is not None:
        scale *= tl.load(global_ptr + row, row < rows, 0.0)
    values = tl.reshape(
        unpacked(words, scale, zero, INT4, out_ptr.dtype.element_ty), (ROWS, BLOCK * 8)
    )
    column = tl.program_id(1) * BLOCK * 8 + tl.arange(0, BLOCK * 8)[None, :]
    tl.store(out_ptr + row * (W * 8) + column, values, (row < rows) & (column < W * 8))


def dequantized(
    words: Tensor,
    scale: Tensor,
    zeros: Tensor | None,
    group: int,
    dtype: torch.dtype,
    global_scale: Tensor | None = None,
) -> Tensor:
    """The values of codes: words int32 [..., K/8], scale [..., K/group], global_scale one per row
    -> [..., K].
    """
    width = words.shape[-1]
    out = words.new_empty((*words.shape[:-1], width * 8), dtype=dtype)
    if rows := words.numel() // width:
        _unpack[(triton.cdiv(rows, 4), triton.cdiv(width, 128))](
            words,
            scale,
            zeros,
            global_scale,
            out,
            rows,
            W=width,
            GROUP=group,
            INT4=scale.is_floating_point(),
            ROWS=4,
            BLOCK=128,
        )
    return out


@ops.linear_w4a16.kernel(
    "triton",
    tokens=MANY,
    refuses=first_refusal(unfit, named("x bias", unlike, HALVES), other_group),
)
def linear_w4a16(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    zeros: Tensor | None,
    bias: Tensor | None,
    group: int,
) -> Tensor:
    return F.linear(x, dequantized(weight, weight_scale, zeros, group, x.dtype), bias)


def refuse_mxfp4_types(x: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Refusal | None:
    return (
        unlike((torch.bfloat16, torch.uint8), x=x)  # uint8: packed e2m1
        or wrong_result((torch.bfloat16,), out_dtype)
        or unlike((out_dtype,), bias=bias)
    )


@ops.linear_mxfp4.kernel("triton", tokens=MANY, refuses=first_refusal(unfit, refuse_mxfp4_types))
def linear_mxfp4(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    x_scale: Tensor | None,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    if x_scale is not None:
        x = dequantized(code_words(x), x_scale, None, 32, out_dtype)
    return F.linear(x, dequantized(code_words(weight), weight_scale, None, 32, out_dtype), bias)


def refuse_nvfp4_types(x: Tensor, bias: Tensor | None) -> Refusal | None:
    return unlike(HALVES, x=x) or unlike((x.dtype,), bias=bias)


@ops.linear_nvfp4.kernel("triton", tokens=MANY, refuses=first_refusal(unfit, refuse_nvfp4_types))
def linear_nvfp4(
    x: Tensor, weight: Tensor, weight_scale: Tensor, global_scale: Tensor, bias: Tensor | None
) -> Tensor:
    words, scale = code_words(weight), weight_scale.view(torch.int8)
    scales = global_scale.contiguous()
    return F.linear(x, dequantized(words, scale, None, NVFP4_GROUP, x.dtype, scales), bias)
