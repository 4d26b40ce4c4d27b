"""Linear layers by cuBLAS, for all arguments that the Triton kernel for few rows refuses."""

import torch
import torch.nn.functional as F
from torch import Tensor

from atomc import ops
from atomc.kernels.checks import no_bf16_products, unlike
from atomc.kernels.row_views import as_rows
from atomc.ops.formats import FLOATS, HALVES
from atomc.ops.op import PreferInductor, Refusal
from atomc.platform import Platform


def refuse_linear(
    platform: Platform, x: Tensor, weight: Tensor, bias: Tensor | None
) -> Refusal | None:
    if not platform.is_cuda:
        return Refusal("hardware", "cuBLAS runs on NVIDIA GPUs")
    return unlike((*FLOATS, torch.float64), x=x, weight=weight, bias=bias)


@ops.linear.kernel("cuda", refuses=refuse_linear, prefer_inductor=PreferInductor.MAX_AUTOTUNE)
def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x, weight, bias)


def refuse_linear_fp32(platform: Platform, x: Tensor, weight: Tensor) -> Refusal | None:
    if not platform.is_cuda:
        return Refusal("hardware", "cuBLAS runs on NVIDIA GPUs")
    return unlike(HALVES, x=x, weight=weight) or no_bf16_products(platform, x.dtype)


# Inductor would cast the weight in each call, and multiply in fp32.
@ops.linear_fp32.kernel("cuda", refuses=refuse_linear_fp32)
def linear_fp32(x: Tensor, weight: Tensor) -> Tensor:
    shape = (*x.shape[:-1], weight.shape[0])
    if not x.numel():
        return x.new_zeros(shape, dtype=torch.float32)
    rows = as_rows(x)
    return torch.mm(rows, weight.t(), out_dtype=torch.float32).view(shape)
