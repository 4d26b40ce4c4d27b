"""Checks and the last step of quantized linears on x86 CPUs, for all libraries. T rows, N outputs,
K inputs, G groups.

The libraries check neither strides nor the number and dtype of scales; the refusals here do.
"""

import torch
from torch import Tensor

from atomc.graph.sizes import known_equal
from atomc.kernels.checks import first_refusal
from atomc.kernels.row_views import with_lead
from atomc.ops.op import Refusal
from atomc.platform import Platform

INT4PACK_GROUPS = (32, 64, 128, 256)


def unlike_int8(
    platform: Platform, x: Tensor, weight: Tensor, x_scale: Tensor, weight_scale: Tensor
) -> Refusal | None:
    """Refuse operands other than those of an int8 product on an x86 CPU."""
    if reason := elsewhere(platform):
        return reason
    for name, dtype in {"x": x.dtype, "weight": weight.dtype}.items():
        if dtype != torch.int8:
            return Refusal("dtype", f"{name} is {dtype}: written for torch.int8")
    if weight_scale.dtype != torch.float32 or not sized(weight_scale, weight.shape[0], 1):
        return Refusal(
            "dtype",
            f"the scales of the weight are {spelled(weight_scale)}, expected one in fp32 per "
            "output",
        )
    if x_scale.dtype != torch.float32:
        return Refusal("dtype", f"the scales of x are {x_scale.dtype}: written for torch.float32")
    return scattered(weight)


def unlike_int4(
    platform: Platform, weight: Tensor, weight_scale: Tensor, zeros: Tensor | None, group: int
) -> Refusal | None:
    """Refuse operands other than those of a product with int4 weights on an x86 CPU."""
    if reason := elsewhere(platform):
        return reason
    if weight.dtype != torch.int32:
        return Refusal("dtype", f"the weight is {weight.dtype}: written for codes in torch.int32")
    if reason := scattered(weight):
        return reason
    expected = (weight.shape[0], weight.shape[1] * 8 // group)
    if (
        not weight_scale.is_floating_point()
        or weight_scale.dtype.itemsize > 4
        or not sized(weight_scale, *expected)
    ):
        return Refusal(
            "dtype",
            f"the scales of the weight are {spelled(weight_scale)}, expected floats "
            f"{list(expected)}",
        )
    if zeros is not None and (zeros.dtype != torch.uint8 or not sized(zeros, *expected)):
        return Refusal(
            "dtype", f"the zero points are {spelled(zeros)}, expected uint8 {list(expected)}"
        )
    return None


def _not_packable(
    platform: Platform, x: Tensor, weight: Tensor, weight_scale: Tensor, group: int
) -> Refusal | None:
    if not platform.has("avx2"):
        return Refusal("hardware", "written for CPUs with AVX2")
    for name, dtype in {"x": x.dtype, "weight_scale": weight_scale.dtype}.items():
        if dtype != torch.bfloat16:
            return Refusal(
                "dtype", f"{name} is {dtype}: PyTorch's kernel is fast in torch.bfloat16 only"
            )
    if group not in INT4PACK_GROUPS:
        return Refusal(
            "shape", f"groups of {group}: written for {', '.join(map(str, INT4PACK_GROUPS))}"
        )
    if weight.shape[0] % 16:
        return Refusal("shape", f"{weight.shape[0]} outputs are not a multiple of 16")
    return None


# For PyTorch's kernel for int4 weights on a CPU.
refuse_int4pack = first_refusal(unlike_int4, _not_packable)


def elsewhere(platform: Platform) -> Refusal | None:
    if not platform.is_cpu or platform.arch != "x86_64":
        return Refusal("hardware", f"written for x86 CPUs, this is {platform.arch}")
    return None


def scattered(weight: Tensor) -> Refusal | None:
    """Refuse a weight that is not a contiguous matrix of static size."""
    if weight.dim() != 2 or not all(isinstance(size, int) for size in weight.shape):
        return Refusal("shape", "the weight is not a matrix of static size")
    return None if weight.is_contiguous() else Refusal("layout", "the weight is not contiguous")


def sized(tensor: Tensor, *shape: int) -> bool:
    return tensor.dim() == len(shape) and all(
        known_equal(a, b) for a, b in zip(tensor.shape, shape, strict=True)
    )


def spelled(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"


def finish(
    total: Tensor, x: Tensor, x_scale: Tensor | None, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """The result [..., N]: `total` [T, N] fp32, which has the scales of outputs, times the scales
    of rows, plus bias. Overwrites `total`.
    """
    out = with_lead(total, x)
    if x_scale is not None:
        out = out.mul_(x_scale)
    if bias is not None:
        out = out.add_(bias)
    return out.to(out_dtype)
