"""The write of new keys and values into a paged cache by AITER's HIP kernel."""

import torch
from torch import Tensor

from atomc import ops
from atomc.graph.sizes import known_equal, same_sizes
from atomc.kernels.aiter.library import FP8_OF, Function, installed
from atomc.kernels.checks import (
    first_refusal,
    named,
    scattered_slots,
    unlike,
    unsupported,
    wrong_rank,
)
from atomc.ops.formats import HALVES
from atomc.ops.op import Refusal
from atomc.platform import Platform

reshape_and_cache_flash = Function("reshape_and_cache_flash", "aiter")


def odd_blocks(cache: Tensor) -> Refusal | None:
    """Why AITER does not take blocks of so many tokens. Where a graph leaves it open it is the
    layout's, a power of two.
    """
    size = cache.shape[1]
    if isinstance(size, int) and size & (size - 1):
        return Refusal("shape", f"blocks of {size} tokens: AITER takes a power of two")
    return None


def odd_heads(q: Tensor) -> Refusal | None:
    """Unless the heads are a power of two wide."""
    width = q.shape[-1]
    if width & (width - 1):
        return Refusal("shape", f"heads of {width}: AITER takes a power of two")
    return None


def scaled(**scales: Tensor | None) -> Refusal | None:
    """If the cache has scales: AITER does not saturate what is too large for codes."""
    return unsupported("AITER's write, which does not saturate codes,", **scales)


def foreign_cache(
    platform: Platform, q: Tensor, k_cache: Tensor, v_cache: Tensor
) -> Refusal | None:
    """Unless both caches are in the dtype of q, or in codes that the machine computes with."""
    codes = FP8_OF[platform.arch]
    if v_cache.dtype == k_cache.dtype and k_cache.dtype in (q.dtype, codes):
        return None
    return Refusal(
        "dtype",
        f"the cache is {k_cache.dtype}, the query {q.dtype}: AITER takes one like it, or {codes}",
    )


def scaled_values(
    q: Tensor, k_cache: Tensor, k_scale: Tensor | None, v_scale: Tensor | None
) -> Refusal | None:
    """If a cache without codes has scales: AITER does not look at them."""
    if k_cache.dtype != q.dtype:
        return None
    return unsupported(
        "AITER's kernel, which scales codes alone,", k_scale=k_scale, v_scale=v_scale
    )


def coded(*scales: Tensor | None, **caches: Tensor) -> Refusal | None:
    """Unless the caches are bfloat16, without scales: AITER does not saturate what is too large for
    codes.
    """
    if any(scale is not None for scale in scales):
        return Refusal("dtype", "the cache has scales: written for torch.bfloat16")
    return unlike((torch.bfloat16,), **caches)


def unpaged(k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> Refusal | None:
    """Why AITER cannot write to these caches in the layout that it calls flash."""
    if reason := scattered_slots(slots):
        return reason
    for cache in (k_cache, v_cache):
        inner = (cache.shape[2] * cache.shape[3], cache.shape[3], 1)
        if not all(known_equal(a, b) for a, b in zip(cache.stride()[1:], inner, strict=True)):
            return Refusal("layout", "the tokens of a block do not follow each other")
    if not all(known_equal(a, b) for a, b in zip(k_cache.shape, v_cache.shape, strict=True)):
        return Refusal("shape", "keys and values differ in width")
    return None


def apart(**tensors: Tensor) -> Refusal | None:
    """Unless the heads of a token [T, heads, D] follow each other: AITER takes no stride between
    them.
    """
    for name, x in tensors.items():
        if not same_sizes(x.stride()[-2:], (x.shape[-1], 1)):
            return Refusal("layout", f"the heads of a token of {name} do not follow each other")
    return None


def _unequal_blocks(k_cache: Tensor, v_cache: Tensor) -> Refusal | None:
    if known_equal(k_cache.stride(0), v_cache.stride(0)):
        return None
    return Refusal("layout", "the blocks of keys are further apart than those of values, or nearer")


@ops.kv_write.kernel(
    "aiter",
    layout="paged",
    refuses=first_refusal(
        installed(reshape_and_cache_flash),
        named("k v k_cache v_cache", unlike, HALVES),
        named("k_scale v_scale", scaled),
        named("k", wrong_rank, (3,)),
        named("k v", apart),
        unpaged,
        _unequal_blocks,
    ),
)
def kv_write(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> Tensor:
    if k.numel():
        one = k.new_ones(1, dtype=torch.float32)  # read by the kernel, also where it scales nothing
        reshape_and_cache_flash(k, v, k_cache, v_cache, slots, "auto", one, one)
    return k.new_empty((0,))
