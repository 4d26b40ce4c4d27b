"""Helpers of the Triton kernels: supported platforms, strides of rows, and programmatic dependent
launch (PDL).

A row is the last dimension of a tensor. A kernel receives the sizes and strides of the dimensions
before it as three, (d0, d1, d2), with stride zero for absent ones. It can therefore read slices of
a packed projection and transposed heads without a copy.
"""

import functools
import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from atomc.graph.sizes import known_equal
from atomc.ops.formats import FLOATS
from atomc.ops.op import Refusal
from atomc.platform import Platform

MAX_DIMS = 4
TRITON_DTYPE = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def not_nvidia(platform: Platform) -> Refusal | None:
    """Refuse platforms other than NVIDIA GPUs, for which the tiles were chosen."""
    if platform.is_cpu:
        return Refusal("hardware", "Triton kernels run on a GPU")
    return Refusal("hardware", "its tiles are chosen for NVIDIA GPUs") if platform.is_rocm else None


def scattered(weight: Tensor, name: str = "the weight") -> Refusal | None:
    """Refuse a weight that is not a contiguous matrix of static size."""
    n, k = weight.shape
    if isinstance(n, int) and isinstance(k, int) and known_equal(weight.stride(0), k):
        return None
    return Refusal("layout", f"{name} is not contiguous, or its size is dynamic")


def unfit(platform: Platform, **tensors: Tensor | None) -> Refusal | None:
    """Refuse a CPU, and tensors whose rows the kernels of this folder cannot read."""
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


def more_rows(x: Tensor, most: int, why: str) -> Refusal | None:
    """Refuse an x of more rows, as far as their number is static."""
    if math.prod(size for size in x.shape[:-1] if isinstance(size, int)) > most:
        return Refusal("slower", f"x has more than {most} rows, {why}")
    return None


def num_rows(x: Tensor) -> int:
    return x.numel() // (x.shape[-1] or 1)


def dot_size(size: int) -> int:
    """The power of two of at least 16, as tl.dot requires, that has room for this size."""
    power: int = triton.next_power_of_2(size)
    return max(16, power)


dot_block = triton.constexpr_function(dot_size)  # in kernels


def int64_view(x: Tensor) -> Tensor:
    """Contiguous 16-bit values, viewed as int64 with four values each."""
    return (x.clone() if x.storage_offset() % 4 else x).view(torch.int64)


def int32_view(x: Tensor) -> Tensor:
    """Contiguous 16-bit values, viewed as int32 with two values each."""
    return (x.clone() if x.storage_offset() % 2 else x).view(torch.int32)


def inner_sizes(x: Tensor) -> tuple[int, int]:
    """d1 and d2 of the rows of x; a kernel does not need d0."""
    return x.shape[1] if x.dim() > 3 else 1, x.shape[-2] if x.dim() > 2 else 1


class Rows(NamedTuple):
    """The rows of a tensor as one argument of a kernel: its memory, and strides of d0, d1, d2."""

    ptr: Tensor
    s0: int
    s1: int
    s2: int


def rows_of(x: Tensor | None) -> Rows | None:
    """The rows of x; without a tensor None, for which a kernel is compiled without this operand."""
    if x is None:
        return None
    s = x.stride()
    s0, s1, s2 = s[0] if len(s) > 1 else 0, s[1] if len(s) > 3 else 0, s[-2] if len(s) > 2 else 0
    return Rows(x, s0, s1, s2)


class Indexed(NamedTuple):
    """A tensor as one argument of a kernel that indexes it: its memory and first two strides."""

    ptr: Tensor
    s0: int
    s1: int


def indexed(x: Tensor | None) -> Indexed | None:
    return None if x is None else Indexed(x, *x.stride()[:2])


@functools.cache
def overlap(device: torch.device) -> dict[str, bool]:
    """Launch arguments of a kernel that calls `wait_for_last`: on Hopper and later it may start
    before the preceding kernel ends.
    """
    if (
        device.type != "cuda"
        or torch.version.hip
        or torch.cuda.get_device_capability(device) < (9, 0)
    ):
        return {"PDL": False}
    return {"PDL": True, "launch_pdl": True}


@functools.cache
def register_limit(device: torch.device) -> dict[str, int]:
    """Launch arguments that let eight programs of four warps run on one NVIDIA multiprocessor."""
    # H200, add_rms_norm_quant of 1,024 rows of 4,096 to fp8, us: 9.8 with 72 registers, which the
    # compiler chooses, and 8.7 with 64.
    return {"maxnreg": 64} if device.type == "cuda" and not torch.version.hip else {}


@triton.jit
def wait_for_last(PDL: constexpr):
    """Wait until the writes of preceding kernels are visible. Call it before any load or store."""
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def let_next_start(PDL: constexpr):
    """Allow the launch of the next kernel, once all programs have called this; it then waits."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def begin(PDL: constexpr):
    """Start a short kernel: let the next one start, then wait for the last one."""
    let_next_start(PDL)
    wait_for_last(PDL)


@triton.jit
def row_offset(tensor, row, sizes):
    """Offsets of the first elements of rows, which are given by number as an int32 tensor; sizes:
    d1 and d2.
    """
    d1, d2 = sizes
    outer = row // d2
    return (
        (outer // d1).to(tl.int64) * tensor.s0
        + (outer % d1).to(tl.int64) * tensor.s1
        + (row % d2).to(tl.int64) * tensor.s2
    )


@triton.jit
def at(tensor, row, sizes):
    """Pointers to the first elements of Rows."""
    return tensor.ptr + row_offset(tensor, row, sizes)


@triton.jit
def item(x, i, j):
    """Pointers to x[i, j] of an Indexed x; i in int64."""
    return x.ptr + i * x.s0 + j * x.s1


@triton.jit
def row_tile(rows, columns, first, ROWS: constexpr, BLOCK: constexpr):
    """Rows [ROWS, 1] of this program, columns [1, BLOCK] from the first on, and which are there."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = first + tl.arange(0, BLOCK)[None, :]
    return row, column, (row < rows) & (column < columns)


@triton.jit
def load_rows(tensor, row, column, sizes, inside):
    """The columns of Rows in fp32, zero where they are not inside."""
    return tl.load(at(tensor, row, sizes) + column, inside, 0.0).to(tl.float32)


@triton.jit
def store_rows(tensor, row, column, sizes, value, inside):
    """Store the columns of Rows in the dtype of the tensor."""
    tl.store(at(tensor, row, sizes) + column, value.to(tensor.ptr.dtype.element_ty), inside)


@triton.jit
def tile_of(down, across, TALL: constexpr):
    """The numbers, down and across, of the tile of this program."""
    # Programs that run at the same time share a band of TALL tiles, so that their operands stay in
    # the L2 cache.
    program = tl.program_id(0)
    top = program // (TALL * across) * TALL
    height = tl.minimum(down - top, TALL)
    inside_band = program % (TALL * across)
    return top + inside_band % height, inside_band // height
