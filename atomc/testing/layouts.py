"""Kernels of a layout whose caches only they can read, over caches that everybody can read."""

import functools
from dataclasses import replace
from typing import Any

from torch import Tensor

from atomc.ops.op import Kernel
from atomc.ops.state import LAYOUTS

PIECE = 16  # bytes
ROLES = ("k_cache", "v_cache")


def plain_order_kernel(kernel: Kernel) -> Kernel:
    """The kernel, with caches shuffled before it runs and put in order again behind it; itself
    unless its layout is shuffled.
    """
    layout = LAYOUTS.get(kernel.layout or "")
    if layout is None or not layout.shuffled:
        return kernel

    @functools.wraps(kernel.function)
    def function(**given: Any) -> Any:
        moved = {role: _shuffled(given[role], role) for role in ROLES}
        result = kernel.function(**given | moved)
        for role, cache in moved.items():
            given[role].copy_(_plain_order(cache, role))
        return result

    return replace(kernel, function=function)


def _shuffled(cache: Tensor, role: str) -> Tensor:
    """[blocks, block_size, K, D] in the order of the layout "shuffled"."""
    blocks, size, heads, width = cache.shape
    x = PIECE // cache.dtype.itemsize
    if role == "k_cache":
        moved = cache.reshape(blocks, size, heads, width // x, x).permute(0, 2, 3, 1, 4)
    else:
        moved = cache.reshape(blocks, size // x, x, heads, width).permute(0, 3, 1, 4, 2)
    return moved.contiguous().view(cache.shape)


def _plain_order(cache: Tensor, role: str) -> Tensor:
    """What `_shuffled` was given."""
    blocks, size, heads, width = cache.shape
    x = PIECE // cache.dtype.itemsize
    if role == "k_cache":
        return cache.view(blocks, heads, width // x, size, x).permute(0, 3, 1, 2, 4).flatten(3)
    return cache.view(blocks, heads, size // x, width, x).permute(0, 2, 4, 1, 3).flatten(1, 2)
