"""Memory of a CUDA graph's own for an input that moves, laid out as the input: compiled code asserts strides."""

import torch
from torch import Tensor

# Beyond this much memory, one byte in MOST_SPREAD must hold an element of the input.
SMALL_BYTES = 2**26
MOST_SPREAD = 4


class StaticBuffer:
    """`tensor` has the shape, strides, dtype and device of an input, and `fill` gives it the values of another one.

    Elements of the input that share memory (an expanded dimension, overlapping windows) share it here, too, and are
    copied once.
    """

    def __init__(self, like: Tensor):
        span = _span(like)
        if span * like.element_size() > max(SMALL_BYTES, MOST_SPREAD * like.nbytes):
            raise RuntimeError(f"an input of shape {list(like.shape)} and strides {list(like.stride())} is spread over "
                               f"{span * like.element_size()} bytes of memory: pass it contiguous")  # fmt: skip
        memory = torch.empty(span, dtype=like.dtype, device=like.device)
        self.tensor = memory.as_strided(like.shape, like.stride(), 0)
        self._flat = _overlaps(like)
        self._to = self._distinct(self.tensor)
        self.fill(like)

    def fill(self, values: Tensor) -> None:
        """Copy a tensor of the same shape and strides."""
        self._to.copy_(self._distinct(values))

    def _distinct(self, x: Tensor) -> Tensor:
        """A view that has each element in memory once; also the gaps, where windows overlap."""
        if self._flat:
            return x.as_strided((_span(x),), (1,), x.storage_offset())
        for dim, (size, stride) in enumerate(zip(x.shape, x.stride(), strict=True)):
            if size > 1 and stride == 0:
                x = x.narrow(dim, 0, 1)
        return x


def _span(x: Tensor) -> int:
    """From the first element to behind the last one in memory, in elements."""
    if x.numel() == 0:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))


def _overlaps(x: Tensor) -> bool:
    """Whether elements may share memory otherwise than along a dimension of stride 0."""
    taken = 1
    for stride, size in sorted((stride, size) for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1):
        if stride and stride < taken:
            return True
        taken += (size - 1) * stride
    return False
