"""Writes of keys and values into paged caches.

Slot s is token s % block_size of block s // block_size; a negative slot writes nothing. A kernel
knows of a key [T, K, D] the address of its first element and the stride between tokens alone: heads
and columns follow each other in memory, whatever the other strides say. The same holds for what a
kernel does not ask of a cache.
"""

import torch
from torch import Tensor

from stand_ins import stands_for


def in_memory(x: Tensor, size: tuple[int, ...], stride: tuple[int, ...]) -> Tensor:
    """What a kernel sees that starts at x and goes by these strides."""
    return x.as_strided(size, stride, x.storage_offset())


def tokens(x: Tensor) -> Tensor:
    """x [T, K, D] by the stride between its tokens alone."""
    return in_memory(x, tuple(x.shape), (x.stride(0), x.shape[2], 1))


def slots_checked(slot_mapping: Tensor) -> None:
    if slot_mapping.dtype not in (torch.int32, torch.int64):
        raise RuntimeError(f"slot_mapping must be int32 or int64, got {slot_mapping.dtype}")


def same_kind(kv_cache_dtype: str, **tensors: Tensor) -> None:
    """Raises unless the cache is kept in the dtype of what is written, called "auto"."""
    if kv_cache_dtype != "auto":
        raise RuntimeError(f"Unsupported data type of kv cache: {kv_cache_dtype}")
    if len({tensor.dtype for tensor in tensors.values()}) > 1:
        raise RuntimeError("the kernel would write bytes of another dtype")


@stands_for("aiter")
def reshape_and_cache_flash(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    kv_cache_dtype: str,
    k_scale: Tensor,
    v_scale: Tensor,
) -> None:
    """key and value [T, K, D] into caches [blocks, block_size, K, D], of which it takes the stride
    between the blocks of the first alone. Of the scales it reads the first element, always.
    """
    slots_checked(slot_mapping)
    same_kind(kv_cache_dtype, key=key, value=value, key_cache=key_cache, value_cache=value_cache)
    if key_cache.stride(0) != value_cache.stride(0):
        raise RuntimeError("key_cache.stride(0) == value_cache.stride(0)")
    if k_scale.dtype != torch.float32 or v_scale.dtype != torch.float32:
        raise RuntimeError("the scales are read as fp32")
    _, heads, width = key.shape
    blocks, block_size = key_cache.shape[:2]
    strides = (key_cache.stride(0), heads * width, width, 1)
    for new, cache in ((key, key_cache), (value, value_cache)):
        new = in_memory(new, tuple(key.shape), (new.stride(0), width, 1))
        seen = in_memory(cache, (blocks, block_size, heads, width), strides)
        for t, slot in enumerate(slot_mapping.tolist()):
            if slot >= 0:
                seen[slot // block_size, slot % block_size] = new[t]
