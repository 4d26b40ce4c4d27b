"""Linear layers by cuBLAS, for all arguments that the Triton kernel for few rows refuses."""

import torch
import torch.nn.functional as F
from torch import Tensor

from atomc import ops
from atomc.kernels.checks import unlike
from atomc.ops.formats import FLOATS
from atomc.ops.op import PreferInductor, Refusal
from atomc.platform import Platform


def refuse_linear(
    platform: Platform, x: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Refusal | None:
    if not platform.is_cuda:
        return Refusal("hardware", "cuBLAS runs on NVIDIA GPUs")
    return unlike((*FLOATS, torch.float64), x=x, weight=weight, bias=bias)


@ops.linear.kernel("cuda", refuses=refuse_linear, prefer_inductor=PreferInductor.MAX_AUTOTUNE)
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.linear(x, weight, bias)
