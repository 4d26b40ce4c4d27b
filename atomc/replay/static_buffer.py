"""Static memory for an input of a CUDA graph, with the strides of the input, which compiled code
asserts.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

# Above SMALL_BYTES, the memory may be at most MAX_SPREAD times the size of the input's elements.
SMALL_BYTES = 2**26
MAX_SPREAD = 4


class StaticBuffer:
    """`tensor` has the shape, strides, dtype and device of an input; `fill` copies the values of
    another input; `distinct_tensor` is the view of `tensor` to which it does.

    Elements of the input that share memory (an expanded dimension, overlapping windows) also share
    it here, and are copied once.
    """

    def __init__(self, like: Tensor):
        length = span(like)
        if length * like.element_size() > max(SMALL_BYTES, MAX_SPREAD * like.nbytes):
            raise RuntimeError(
                f"an input of shape {list(like.shape)} and strides {list(like.stride())} is "
                "spread over "
                f"{length * like.element_size()} bytes of memory: pass it contiguous"
            )
        memory = torch.empty(length, dtype=like.dtype, device=like.device)
        self.tensor = memory.as_strided(like.shape, like.stride(), 0)
        self._flat = _overlaps(like)
        sizes = zip(like.shape, like.stride(), strict=True)
        self._expanded = [
            dim for dim, (size, stride) in enumerate(sizes) if size > 1 and stride == 0
        ]
        self.distinct_tensor = self.distinct(self.tensor)
        fill([self], [like])

    def distinct(self, x: Tensor) -> Tensor:
        """A view that contains each element in memory once; including gaps if windows overlap."""
        if self._flat:
            return x.as_strided((span(x),), (1,), x.storage_offset())
        for dim in self._expanded:
            x = x.narrow(dim, 0, 1)
        return x


def fill(buffers: Sequence[StaticBuffer], values: Sequence[Tensor]) -> None:
    """Copy a tensor of the same shape and strides into each buffer."""
    if buffers:
        new = [buffer.distinct(x) for buffer, x in zip(buffers, values, strict=True)]
        torch._foreach_copy_([buffer.distinct_tensor for buffer in buffers], new)


def span(x: Tensor) -> int:
    """The distance from the first element in memory to the end of the last one, in elements."""
    if x.numel() == 0:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))


def _overlaps(x: Tensor) -> bool:
    """Whether elements may share memory other than along a dimension of stride 0."""
    taken = 1
    for stride, size in sorted(
        (stride, size) for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1
    ):
        if stride and stride < taken:
            return True
        taken += (size - 1) * stride
    return False
