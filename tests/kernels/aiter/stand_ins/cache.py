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


def of_shuffled(
    key_cache: Tensor, value_cache: Tensor, heads: int, width: int
) -> tuple[Tensor, Tensor]:
    """Keys and values [blocks, block_size, heads, D] as kernels find them that go by the sizes of
    keys [blocks, heads, D/x, block_size, x] alone, values being [blocks, heads, block_size/x, D, x]
    without gaps.
    """
    blocks, _, _, block_size, x = key_cache.shape
    whole = heads * width * block_size
    keys = in_memory(
        key_cache,
        (blocks, block_size, heads, width // x, x),
        (whole, x, width * block_size, block_size * x, 1),
    )
    values = in_memory(
        value_cache,
        (blocks, block_size // x, x, heads, width),
        (whole, width * x, 1, width * block_size, x),
    )
    return keys, values


def write_shuffled(keys: Tensor, values: Tensor, slot: int, key: Tensor, value: Tensor) -> None:
    """key and value [K, D] of one token to a slot of what of_shuffled gave."""
    block_size, x = keys.shape[1], keys.shape[4]
    block, offset = divmod(slot, block_size)
    keys[block, offset] = key.unflatten(-1, (-1, x))
    values[block, offset // x, offset % x] = value


@stands_for("aiter")
def reshape_and_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    kv_cache_dtype: str,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    asm_layout: bool = False,
) -> None:
    """key and value [T, K, D] into keys [blocks, K, D/x, block_size, x] and values [blocks, K, D,
    block_size], or [blocks, K, block_size/x, D, x] with asm_layout. Scales are for fp8 alone.
    """
    slots_checked(slot_mapping)
    same_kind(kv_cache_dtype, key=key, value=value, key_cache=key_cache, value_cache=value_cache)
    if not asm_layout:
        raise NotImplementedError("values [blocks, K, D, block_size]")
    _, heads, width = key.shape
    keys, values = of_shuffled(key_cache, value_cache, heads, width)
    new_keys, new_values = (
        in_memory(x, tuple(key.shape), (x.stride(0), width, 1)) for x in (key, value)
    )
    for t, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            write_shuffled(keys, values, slot, new_keys[t], new_values[t])
