"""Caches in the layout "shuffled" as AITER's kernels see them, in pieces of 16 bytes."""

import math

from torch import Tensor

from atomc.graph.sizes import known_equal
from atomc.kernels.checks import scattered_slots
from atomc.ops.op import Refusal

PIECE = 16  # bytes


def shuffled_views(k_cache: Tensor, v_cache: Tensor) -> tuple[Tensor, Tensor]:
    """Keys [blocks, K, D/x, block_size, x] and values [blocks, K, block_size/x, D, x] of caches
    [blocks, block_size, K, D].
    """
    blocks, size, heads, width = k_cache.shape
    x = PIECE // k_cache.dtype.itemsize
    return (
        k_cache.view(blocks, heads, width // x, size, x),
        v_cache.view(blocks, heads, size // x, width, x),
    )


def gathered_from_pieces(k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values [n, K, D] of these slots of shuffled caches."""
    keys, values = shuffled_views(k_cache, v_cache)
    block, offset = slots // k_cache.shape[1], slots % k_cache.shape[1]
    piece, place = offset // keys.shape[-1], offset % keys.shape[-1]
    return keys[block, :, :, offset].flatten(-2), values[block, :, piece, :, place]


def unshuffled(k_cache: Tensor, v_cache: Tensor) -> Refusal | None:
    """Why these cannot be caches in pieces of 16 bytes. A block has 16 tokens, or several times as
    many.
    """
    x = PIECE // k_cache.dtype.itemsize
    width = k_cache.shape[3]
    if not all(known_equal(a, b) for a, b in zip(k_cache.shape, v_cache.shape, strict=True)):
        return Refusal("shape", "keys and values differ in width")
    if width % x:
        return Refusal("shape", f"heads of {width} are no whole pieces of {x}")
    for cache in (k_cache, v_cache):
        for d in range(4):
            if not known_equal(cache.stride(d), math.prod(cache.shape[d + 1 :])):
                return Refusal("layout", "a cache is not contiguous")
    return None


def unwritable(k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> Refusal | None:
    return scattered_slots(slots) or unshuffled(k_cache, v_cache)
