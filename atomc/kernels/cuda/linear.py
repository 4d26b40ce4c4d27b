"""Linear layers by cuBLAS, where Triton's kernel for few rows has refused: it has all the others."""

import torch
import torch.nn.functional as F
from torch import Tensor

from atomc import ops
from atomc.op import PreferInductor, Refusal
from atomc.platform import Platform

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def _not_a_product(platform: Platform, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Refusal | None:
    if not platform.is_cuda:
        return Refusal("hardware", "cuBLAS runs on NVIDIA GPUs")
    if x.dtype not in FLOATS or weight.dtype != x.dtype or (bias is not None and bias.dtype != x.dtype):
        dtypes = ", ".join(str(tensor.dtype) for tensor in (x, weight, bias) if tensor is not None)
        return Refusal("dtype", f"x, weight and bias are {dtypes}: cuBLAS takes floats that are alike")
    return None


@ops.linear.kernel("cuda", refuses=_not_a_product, prefer_inductor=PreferInductor.MAX_AUTOTUNE)
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.linear(x, weight, bias)
