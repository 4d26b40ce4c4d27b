"""What compiled kernels do with memory: they get a pointer, and some of the strides.

A kernel that ignores strides reads wrong numbers where they are not what it assumes; a kernel that
stores whole dwords writes past the end of a row that does not end on one. Both must show here, too.
"""

import torch
from torch import Tensor


class AiterCheckError(RuntimeError):
    """A check in AITER's host code; several of these end the process."""


def check(condition: bool, text: str) -> None:
    if not condition:
        raise AiterCheckError(text)


def contiguous_view(tensor: Tensor, *shape: int) -> Tensor:
    """The elements from the tensor's first one on, as if it were contiguous. Raises RuntimeError if
    its memory ends before.
    """
    strides = [1] * len(shape)
    for d in range(len(shape) - 2, -1, -1):
        strides[d] = strides[d + 1] * shape[d + 1]
    return tensor.as_strided(shape, strides)


def row_view(tensor: Tensor) -> Tensor:
    """The rows [rows, width] by the stride of the first dimension alone; the columns are taken to
    be contiguous.
    """
    width = tensor.shape[-1]
    return tensor.as_strided((tensor.numel() // width, width), (tensor.stride(0), 1))


def spill(rows: Tensor, unit: int = 4) -> None:
    """Damage what a store of whole units of `unit` bytes writes past the end of each row: the first
    elements of the next one, if the rows follow each other.
    """
    count, width = rows.shape
    over = (-width * rows.element_size() % unit) // rows.element_size()
    if over and count > 1:
        rows[1:, :over] = float("nan") if rows.is_floating_point() else 0x55


def fp32(tensor: Tensor, name: str, *shape: int) -> Tensor:
    """A tensor that the kernel reads through a pointer to float."""
    check(tensor.dtype == torch.float32, f"{name} is read as float, it is {tensor.dtype}")
    return contiguous_view(tensor, *(shape or tensor.shape))
