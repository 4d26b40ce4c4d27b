"""The write of new keys and values into a paged cache in Triton."""

import triton
import triton.language as tl
from torch import Tensor

from atomc import ops
from atomc.kernels.triton.launch import (
    begin,
    heads_a_program,
    inner_sizes,
    num_rows,
    overlap,
    row_offset,
    row_strides,
    unfit,
)
from atomc.platform import Platform
from atomc.sizes import known_equal


@triton.jit
def cache_offset(slots_ptr, row, inside, HEADS: tl.constexpr, token_stride, head_stride):
    """Where rows (token * HEADS + head) go in a cache, and which of them go anywhere."""
    slot = tl.load(slots_ptr + row // HEADS, inside, -1)
    return slot * token_stride + (row % HEADS).to(tl.int64) * head_stride, slot >= 0


@triton.jit
def copy_rows(from_ptr, from_at, to_ptr, to_at, inside, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """WIDTH columns from each offset to each other one; the three are columns of a block."""
    column = tl.arange(0, BLOCK)[None, :]
    inside = inside & (column < WIDTH)
    value = tl.load(from_ptr + from_at + column, inside)
    if from_ptr.dtype.element_ty != to_ptr.dtype.element_ty:
        value = value.to(tl.float32).to(to_ptr.dtype.element_ty)
    tl.store(to_ptr + to_at + column, value, inside)


@triton.jit(do_not_specialize=["rows"])
def _kv_write(
    k_ptr, v_ptr, k_cache_ptr, v_cache_ptr, slots_ptr, rows, d1, k0, k1, k2, v0, v1, v2, k_token, k_head, v_token,
    v_head, HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    begin(PDL)
    k_at, inside = cache_offset(slots_ptr, row, row < rows, HEADS, k_token, k_head)
    v_at, _ = cache_offset(slots_ptr, row, row < rows, HEADS, v_token, v_head)
    copy_rows(k_ptr, row_offset(row, d1, HEADS, k0, k1, k2), k_cache_ptr, k_at, inside, D, BLOCK_D)
    copy_rows(v_ptr, row_offset(row, d1, HEADS, v0, v1, v2), v_cache_ptr, v_at, inside, DV, BLOCK_DV)


def unwritable(
    platform: Platform, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor,
    k_scale: Tensor | None = None, v_scale: Tensor | None = None,
) -> str | None:  # fmt: skip
    """Why k and v cannot be written to these caches here."""
    if reason := unfit(platform, k=k, v=v, k_cache=k_cache, v_cache=v_cache):
        return reason
    if k_scale is not None or v_scale is not None:
        return "the cache has scales"
    if k.dim() not in (3, 4) or v.dim() != k.dim():
        return "keys and values come as [T, K, D] or [B, T, K, D]"
    if slots.dim() != 1 or not known_equal(slots.stride(0), 1):
        return "slots are not one contiguous row"
    for cache in (k_cache, v_cache):
        if not known_equal(cache.stride(0), cache.shape[1] * cache.stride(1)):
            return "the blocks of the cache do not follow each other"
    return None


@ops.kv_write.kernel("triton", layout="paged", refuses=unwritable)
def kv_write(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor,
    k_scale: Tensor | None = None, v_scale: Tensor | None = None,
) -> Tensor:  # fmt: skip
    if rows := num_rows(k):
        d1, heads = inner_sizes(k)
        rows_a_program = heads_a_program(rows)
        _kv_write[(triton.cdiv(rows, rows_a_program),)](
            k, v, k_cache, v_cache, slots, rows, d1, *row_strides(k), *row_strides(v), k_cache.stride(1),
            k_cache.stride(2), v_cache.stride(1), v_cache.stride(2), HEADS=heads, D=k.shape[-1], DV=v.shape[-1],
            BLOCK_D=triton.next_power_of_2(k.shape[-1]), BLOCK_DV=triton.next_power_of_2(v.shape[-1]),
            ROWS=rows_a_program, num_warps=4, **overlap(k.device),
        )  # fmt: skip
    return k.new_empty((0,))
