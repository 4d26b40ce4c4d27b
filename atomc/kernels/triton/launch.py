"""What the Triton kernels share: where they run, how the rows of a tensor lie, and the start before
the last one ends.

A row is the last dimension of a tensor. The dimensions before it are told as three, (d0, d1, d2)
with zero strides where a tensor has fewer, so that a kernel takes slices of a packed projection and
transposed heads as they are.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from atomc.graph.sizes import known_equal
from atomc.kernels.checks import FLOATS
from atomc.ops.op import Refusal
from atomc.platform import Platform

MAX_DIMS = 4


def not_nvidia(platform: Platform) -> Refusal | None:
    """Why kernels whose tiles are chosen for NVIDIA GPUs do not run there."""
    if platform.is_cpu:
        return Refusal("hardware", "Triton kernels run on a GPU")
    return Refusal("hardware", "its tiles are chosen for NVIDIA GPUs") if platform.is_rocm else None


def scattered(weight: Tensor, name: str = "the weight") -> Refusal | None:
    """Unless a weight is a matrix of constant size whose rows follow each other."""
    n, k = weight.shape
    if isinstance(n, int) and isinstance(k, int) and known_equal(weight.stride(0), k):
        return None
    return Refusal("layout", f"{name} is not contiguous, or its size is dynamic")


def unfit(platform: Platform, **tensors: Tensor | None) -> Refusal | None:
    """Why no kernel here can run there, or cannot read the rows of one of these tensors."""
    if platform.is_cpu:
        return Refusal("hardware", "Triton kernels run on a GPU")
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if tensor.dtype not in FLOATS:
            return Refusal("dtype", f"{name} is {tensor.dtype}: supported are fp32, bf16 and fp16")
        if not 1 <= tensor.dim() <= MAX_DIMS:
            return Refusal(
                "shape", f"{name} has {tensor.dim()} dimensions: written for 1 to {MAX_DIMS}"
            )
        if not isinstance(tensor.shape[-1], int):
            return Refusal("shape", f"the last dimension of {name} is dynamic")
        if tensor.shape[-1] > 1 and not known_equal(tensor.stride(-1), 1):
            return Refusal("layout", f"the last dimension of {name} is not contiguous")
    return None


def num_rows(x: Tensor) -> int:
    return x.numel() // (x.shape[-1] or 1)


def by_fours(x: Tensor) -> Tensor:
    """Contiguous values of 16 bits, four at a time."""
    return (x.clone() if x.storage_offset() % 4 else x).view(torch.int64)


def inner_sizes(x: Tensor) -> tuple[int, int]:
    """d1 and d2 of the rows of x. d0 is left out: nothing is divided by it."""
    return x.shape[1] if x.dim() > 3 else 1, x.shape[-2] if x.dim() > 2 else 1


def row_strides(x: Tensor) -> tuple[int, int, int]:
    """Strides of d0, d1 and d2."""
    s = x.stride()
    return s[0] if len(s) > 1 else 0, s[1] if len(s) > 3 else 0, s[-2] if len(s) > 2 else 0


@functools.cache
def overlap(device: torch.device) -> dict[str, Any]:
    """Launch arguments of a kernel that waits by itself: from Hopper on, it may start before the
    last one has ended.
    """
    if (
        device.type != "cuda"
        or torch.version.hip
        or torch.cuda.get_device_capability(device) < (9, 0)
    ):
        return {"PDL": False}
    return {"PDL": True, "launch_pdl": True}


@functools.cache
def at_most_64_registers(device: torch.device) -> dict[str, Any]:
    """Launch arguments of a program of four warps of which eight are to fit a multiprocessor of
    NVIDIA's.
    """
    # H200, add_rms_norm_quant of 1,024 rows of 4,096 to fp8, us as it comes (72 registers) and with
    # 64: 9.8 and 8.7.
    return {"maxnreg": 64} if device.type == "cuda" and not torch.version.hip else {}


@triton.jit
def wait_for_last(PDL: tl.constexpr):
    """Wait until all that kernels before this one write is there. Stands before every load and
    every store.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def let_next_start(PDL: tl.constexpr):
    """The next kernel may take its place on the device: it is launched when all programs are here,
    and then waits.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def begin(PDL: tl.constexpr):
    """The start of a short kernel."""
    let_next_start(PDL)
    wait_for_last(PDL)


@triton.jit
def row_offset(row, d1, d2, s0, s1, s2):
    """Where rows (numbers in an int32 tensor) begin."""
    outer = row // d2
    return (
        (outer // d1).to(tl.int64) * s0
        + (outer % d1).to(tl.int64) * s1
        + (row % d2).to(tl.int64) * s2
    )
