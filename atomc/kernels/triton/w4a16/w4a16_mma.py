"""Linear layers with 4-bit weights that are held in the order of fragments.py, in Triton for NVIDIA
GPUs. The runtime holds this form alone. A user's module keeps its own weights beside it; where such
copies would take too much memory, w4a16.py and dequantized.py read the weights as they are stored.

Up to MAX_ROWS rows, codes are unpacked in registers. More rows are multiplied by cuBLAS with a
weight that each call unpacks to 16 bits.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from atomc import ops
from atomc.kernels.checks import first_refusal, named, unlike, unsupported, wrong_result
from atomc.kernels.triton.launch.launch import num_rows
from atomc.kernels.triton.launch.tiles import LINEAR_4_BITS
from atomc.kernels.triton.w4a16 import strip_values, w4a16_mma_pair, w4a16_mma_rows
from atomc.kernels.triton.w4a16.fragments import (
    STRIP,
    e2m1_fragments,
    int4_fragments,
    packed_groups,
    raised_exponents,
)
from atomc.kernels.triton.w4a16.unpacking import other_group, unfit
from atomc.ops.formats import HALVES
from atomc.ops.op import Refusal

# Up to this number of rows of x. us, unpacked in registers / to memory, 192 and 256 rows:
# 4096->4096 25 / 28, 25 / 25, 4096->24576 103 / 133, 97 / 141, 2048->5120 21 / 17, 22 / 17.
MAX_ROWS = 256


def _no_strips(weight: Tensor) -> Refusal | None:
    rows = weight.shape[0]
    if rows % STRIP.value == 0:
        return None
    return Refusal("shape", f"the weight has {rows} rows: written for multiples of {STRIP.value}")


@ops.linear_w4a16.kernel(
    "triton",
    refuses=first_refusal(
        unfit, named("x weight_scale bias", unlike, HALVES), other_group, _no_strips
    ),
    prepare={"weight": int4_fragments, "weight_scale": packed_groups, "zeros": packed_groups},
    attributes=("group",),
    tuned_for=LINEAR_4_BITS.archs,
)
def linear_w4a16(
    x: Tensor,
    weight: tuple[Tensor],
    weight_scale: tuple[Tensor],
    zeros: tuple[Tensor] | None,
    bias: Tensor | None,
    group: int,
) -> Tensor:
    stored = *weight, *weight_scale, zeros[0] if zeros else None
    if w4a16_mma_pair.serves(x):
        return w4a16_mma_pair.multiply(x, *stored, bias, group)
    if num_rows(x) <= MAX_ROWS:
        return w4a16_mma_rows.multiply(x, *stored, bias, group)
    return F.linear(x, strip_values.unpacked(*stored, group, x.shape[-1], x.dtype), bias)


def refuse_mxfp4_types(
    x: Tensor, x_scale: Tensor | None, bias: Tensor | None, out_dtype: torch.dtype
) -> Refusal | None:
    taken = (torch.bfloat16,)  # fp16 cannot represent all scales
    return (
        unsupported("the kernel for 16-bit rows", x_scale=x_scale)
        or unlike(taken, x=x, bias=bias)
        or wrong_result(taken, out_dtype)
    )


@ops.linear_mxfp4.kernel(
    "triton",
    refuses=first_refusal(unfit, refuse_mxfp4_types, _no_strips),
    prepare={"weight": e2m1_fragments, "weight_scale": raised_exponents},
    tuned_for=LINEAR_4_BITS.archs,
)
def linear_mxfp4(
    x: Tensor, weight: tuple[Tensor], weight_scale: tuple[Tensor], bias: Tensor | None
) -> Tensor:
    stored = *weight, *weight_scale, None
    if num_rows(x) <= MAX_ROWS:
        return w4a16_mma_rows.multiply(x, *stored, bias, 32, int4=False)
    return F.linear(x, strip_values.unpacked(*stored, 32, x.shape[-1], x.dtype, int4=False), bias)
