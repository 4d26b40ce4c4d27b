"""Write new keys and values into a paged cache, in Triton.

An fp8 cache is viewed as bytes, so that every device and the interpreter can write it; CODES is the
kind of its codes, "fn" or "fnuz", and "" for other caches. Codes equal those of the reference bit
for bit.
"""

from typing import NamedTuple, Unpack

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from atomc import ops
from atomc.graph.sizes import known_equal
from atomc.kernels.checks import scattered_blocks, scattered_slots, strided, unlike, unsupported
from atomc.kernels.triton.launch.launch import (
    MAX_DIMS,
    Rows,
    at,
    begin,
    inner_sizes,
    num_rows,
    overlap,
    rows_of,
    unfit,
)
from atomc.kernels.triton.launch.tiles import HEAD_ROWS
from atomc.kernels.triton.rows.quant import fp8_codes, lacks_fp8_rounding
from atomc.ops.attention import CacheWrite
from atomc.ops.formats import FLOATS, FP8
from atomc.ops.op import Refusal
from atomc.platform import Platform


class Cache(NamedTuple):
    """A paged cache as one argument of a kernel: scale of codes, strides of tokens and heads."""

    ptr: Tensor
    scale: Tensor | None
    token: int
    head: int


def cache_of(cache: Tensor, scale: Tensor | None) -> Cache:
    return Cache(byte_view(cache), scale, *cache.stride()[1:3])


class Slots(NamedTuple):
    """The slots of rows as one argument of a kernel.

    end    slots from here on are written nowhere, as those before 0
    apart  how far the slots of a sequence are from those of the one before, which has the same
           offsets; None: each token has a slot of its own
    """

    ptr: Tensor
    end: int
    apart: int | None


def kernel_slots(slots: Tensor, k: Tensor, cache: Tensor) -> Slots:
    """In tokens of the cache, whose blocks need not follow each other where sequences share
    offsets.
    """
    blocks, block_size = cache.shape[:2]
    if _are_shared(slots, k):
        return Slots(slots, block_size, cache.stride(0) // cache.stride(1))
    return Slots(slots, blocks * block_size, None)


def _are_shared(slots: Tensor, k: Tensor) -> bool:
    """Whether slots are offsets that all sequences of k [B, T, K, D] share (ops.kv_write)."""
    return (
        k.dim() == MAX_DIMS
        and not known_equal(k.shape[0], 1)
        and known_equal(slots.shape[0], k.shape[1])
    )


@triton.jit
def inverse_scale(scale_ptr):
    """The factor of values before they are rounded to codes; 1 for a cache without scales."""
    inverse = 1.0
    if scale_ptr is not None:
        inverse = tl.div_rn(1.0, tl.load(scale_ptr).to(tl.float32))
    return inverse


@triton.jit
def stored_values(x, inverse, DTYPE: constexpr, CODES: constexpr, BY_BITS: constexpr):
    """x as it is stored in a cache: in DTYPE, or as a code."""
    if CODES != "":
        return fp8_codes(x.to(tl.float32) * inverse, CODES == "fnuz", BY_BITS)
    else:
        return x.to(tl.float32).to(DTYPE)


@triton.jit
def code_numbers(code, DTYPE: constexpr, CODES: constexpr):
    """Elements loaded from a cache, in DTYPE; of codes (bytes) the value / 256, or / 128 for
    "fnuz".

    The bits of a code are moved to the bits of an fp16 number, which is exact on every device.
    """
    if CODES == "":
        return code
    else:
        bits = code.to(tl.int32)
        nan = bits == 0x80 if CODES == "fnuz" else (bits & 0x7F) == 0x7F
        half = tl.where(nan, 0x7E00, ((bits & 0x80) << 8) | ((bits & 0x7F) << 7))
        return half.to(tl.int16).to(tl.float16, bitcast=True).to(DTYPE)


@triton.jit
def scale_of_numbers(scale_ptr, CODES: constexpr):
    """The factor from results of `code_numbers` to the cached values."""
    scale = 1.0
    if CODES != "":
        scale = 128.0 if CODES == "fnuz" else 256.0
        if scale_ptr is not None:
            scale *= tl.load(scale_ptr).to(tl.float32)
    return scale


@triton.jit
def copy_rows(
    source,
    target,
    inside,
    inverse,
    WIDTH: constexpr,
    CODES: constexpr,
    BY_BITS: constexpr,
):
    """Copy WIDTH columns from pointers to pointers, converted for a cache. source, target and
    inside are [ROWS, 1].
    """
    column = tl.arange(0, triton.next_power_of_2(WIDTH))[None, :]
    inside = inside & (column < WIDTH)
    value = tl.load(source + column, inside, 0.0)
    value = stored_values(value, inverse, target.dtype.element_ty, CODES, BY_BITS)
    tl.store(target + column, value, inside)


@triton.jit
def slot_of(slots, token, inside, d1):
    """The slots of tokens, -1 for those that have none. d1: the tokens of a sequence."""
    if slots.apart is None:
        slot = tl.load(slots.ptr + token, inside, -1)
        return tl.where(slot < slots.end, slot, -1)
    else:
        slot = tl.load(slots.ptr + token % d1, inside, -1)
        first = (token // d1).to(tl.int64) * slots.apart
        return tl.where((slot >= 0) & (slot < slots.end), first + slot, -1)


@triton.jit
def cache_at(cache, slot, row, HEADS: constexpr):
    """Pointers to rows (token * HEADS + head) in a Cache; the token is in this slot."""
    return cache.ptr + slot * cache.token + (row % HEADS).to(tl.int64) * cache.head


@triton.jit
def cache_rows(
    x,
    cache,
    slot,
    row,
    d1,
    HEADS: constexpr,
    WIDTH: constexpr,
    CODES: constexpr,
    BY_BITS: constexpr,
):
    """Write the rows (token * HEADS + head) of tokens that have a slot into a Cache."""
    target = cache_at(cache, slot, row, HEADS)
    inverse = inverse_scale(cache.scale)
    copy_rows(at(x, row, (d1, HEADS)), target, slot >= 0, inverse, WIDTH, CODES, BY_BITS)


@triton.jit(do_not_specialize=["rows"])
def _kv_write(
    k,
    v,
    k_cache,
    v_cache,
    slots,
    rows,
    d1,
    HEADS: constexpr,
    D: constexpr,
    DV: constexpr,
    ROWS: constexpr,
    CODES: constexpr,
    BY_BITS: constexpr,
    PDL: constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    begin(PDL)
    slot = slot_of(slots, row // HEADS, row < rows, d1)
    cache_rows(k, k_cache, slot, row, d1, HEADS, D, CODES, BY_BITS)
    cache_rows(v, v_cache, slot, row, d1, HEADS, DV, CODES, BY_BITS)


def byte_view(cache: Tensor) -> Tensor:
    """The cache as kernels take it: fp8 viewed as uint8."""
    return cache.view(torch.uint8) if cache.dtype in FP8 else cache


def codes_of(cache: Tensor) -> dict[str, str | bool]:
    """Launch arguments that describe the elements of a cache to a kernel that writes it.

    Fused multiply-add is disabled for codes. It would be more accurate, but where product and sum
    cancel, a code could be several steps from that of the reference.
    """
    if cache.dtype not in FP8:
        return {"CODES": "", "BY_BITS": False}
    codes = "fnuz" if cache.dtype == torch.float8_e4m3fnuz else "fn"
    return {
        "CODES": codes,
        "BY_BITS": lacks_fp8_rounding(cache.dtype, cache.device),
        "enable_fp_fusion": False,
    }


def uncachable(
    platform: Platform, scales: dict[str, Tensor | None], **caches: Tensor
) -> Refusal | None:
    """Refuse caches, or scales of their codes, that the Triton kernels cannot read or write."""
    plain = {name: cache for name, cache in caches.items() if cache.dtype not in FP8}
    codes = {name: cache for name, cache in caches.items() if cache.dtype in FP8}
    return (
        unfit(platform, **plain)
        or unlike((*FLOATS, *FP8), **caches)
        or strided(**codes)
        or (
            unsupported(f"a cache of {next(iter(plain.values())).dtype}", **scales)
            if plain
            else _not_numbers(**scales)
        )
    )


def _not_numbers(**scales: Tensor | None) -> Refusal | None:
    """Refuse scales that are not one number in fp32."""
    for name, scale in scales.items():
        if scale is not None and (
            scale.dtype != torch.float32 or not known_equal(scale.numel(), 1)
        ):
            return Refusal(
                "dtype",
                f"{name} is {scale.dtype} {list(scale.shape)}: expected one number of fp32",
            )
    return None


def refuse_kv_write(
    platform: Platform,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> Refusal | None:
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    if reason := unfit(platform, k=k, v=v) or uncachable(
        platform, scales, k_cache=k_cache, v_cache=v_cache
    ):
        return reason
    if k.dim() not in (3, 4) or v.dim() != k.dim():
        return Refusal("shape", "keys and values must be [T, K, D] or [B, T, K, D]")
    return scattered_slots(slots) or (
        _scattered_sequences(k_cache, v_cache)
        if _are_shared(slots, k)
        else scattered_blocks(k_cache, v_cache)
    )


def _scattered_sequences(k_cache: Tensor, v_cache: Tensor) -> Refusal | None:
    """Refuse caches of which no number of slots leads from each block to the next, in both."""
    apart, token, head = k_cache.stride()[:3]
    _, size, heads, _ = k_cache.shape
    contiguous = known_equal(apart, size * token)
    heads_first = known_equal(apart, heads * head) and known_equal(head, size * token)
    if not contiguous and not heads_first:
        return Refusal("layout", "the blocks of keys are not a number of slots apart")
    if not known_equal(apart * v_cache.stride(1), v_cache.stride(0) * token):
        return Refusal("layout", "keys and values differ in how many slots their blocks are apart")
    return None


def written_rows(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> tuple[Rows | None, Rows | None, Cache, Cache, Slots]:
    """The arguments of kv_write as kernels take them: rows, caches, and their slots."""
    return (
        rows_of(k),
        rows_of(v),
        cache_of(k_cache, k_scale),
        cache_of(v_cache, v_scale),
        kernel_slots(slots, k, k_cache),
    )


@ops.kv_write.kernel("triton", layout="paged", refuses=refuse_kv_write, tuned_for=HEAD_ROWS.archs)
def kv_write(k: Tensor, **write: Unpack[CacheWrite]) -> Tensor:
    if rows := num_rows(k):
        d1, heads = inner_sizes(k)
        rows_a_program = HEAD_ROWS.choose(k.device, rows)
        _kv_write[(triton.cdiv(rows, rows_a_program),)](
            *written_rows(k, **write),
            rows,
            d1,
            HEADS=heads,
            D=k.shape[-1],
            DV=write["v"].shape[-1],
            ROWS=rows_a_program,
            num_warps=4,
            **codes_of(write["k_cache"]),
            **overlap(k.device),
        )
    return k.new_empty((0,))
