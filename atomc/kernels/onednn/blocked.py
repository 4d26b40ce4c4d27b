"""Weights in oneDNN's blocked layout: copies, which the caller must keep up to date."""

import torch
from torch import Tensor

from atomc.kernels.cpu_linears import scattered
from atomc.ops.op import Prepared, Refusal
from atomc.platform import Platform


def blocked(weight: Tensor, rows: int) -> Prepared:
    """A copy of the weight [N, K] in the layout that oneDNN chooses for this number of rows of x.
    It is valid for any number.
    """
    return Prepared((torch.ops.mkldnn._reorder_linear_weight(weight.detach(), rows),))


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x @ weight.T + bias, with a weight made by `blocked`."""
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return out


def unfit(
    dtype: torch.dtype, platform: Platform, x: Tensor, weight: Tensor, bias: Tensor | None
) -> Refusal | None:
    """Refuse operands that oneDNN cannot, or should not, multiply in `dtype`."""
    if not platform.is_cpu:
        return Refusal("hardware", "oneDNN kernels run on a CPU")
    if platform.arch != "x86_64":
        return Refusal("hardware", f"measured on x86 CPUs only, this is {platform.arch}")
    dtypes = [t.dtype for t in (x, weight, bias) if t is not None]
    if any(d != dtype for d in dtypes):
        return Refusal(
            "dtype",
            f"arguments are {', '.join(str(d) for d in dict.fromkeys(dtypes))}: written "
            f"for {dtype}",
        )
    return scattered(weight)
