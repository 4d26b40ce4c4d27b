"""Attention of few new tokens over dense keys, with any mask, as with a static cache of
transformers.

A program computes all query rows that share a key/value head against one split of the keys. It
reads the mask before the keys, and skips tiles that no row sees. T new tokens, S keys, N query
heads, K key/value heads, G = N / K.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from atomc import ops
from atomc.kernels.checks import no_bf16_products, unlike
from atomc.kernels.triton.attention.attention import BASE_2, MAX_WIDTH, score_factors
from atomc.kernels.triton.attention.attention_tiles import MAX_SPLITS, has_room, multiprocessors
from atomc.kernels.triton.attention.combine_splits import (
    add_weighted,
    combined,
    empty_splits,
    store_attended,
)
from atomc.kernels.triton.launch.launch import begin, dot_block, dot_size, overlap, rows_of, unfit
from atomc.ops.formats import FLOATS
from atomc.ops.op import Refusal
from atomc.platform import Platform

MAX_ROWS = 64  # query rows of one program, G * T
TILE_BYTES = 2**15  # of the keys of a tile


class Mask(NamedTuple):
    """[B, N, T, S] as one argument of a kernel; no memory: there is no mask."""

    ptr: Tensor | None
    batch: int | None = None
    head: int | None = None
    token: int | None = None
    key: int | None = None


@triton.jit
def _mask_values(mask, row, key, seen):
    return tl.load(mask.ptr + row[:, None] + key.to(tl.int64)[None, :] * mask.key, seen, 0)


@triton.jit(do_not_specialize=["num_keys"])
def _attend(
    q,
    k,
    v,
    mask,
    sinks,
    out_ptr,
    lse_ptr,
    num_keys,
    inner,
    unit,
    T: constexpr,
    N: constexpr,
    GROUP: constexpr,
    D: constexpr,
    BLOCK_N: constexpr,
    CAUSAL: constexpr,
    WINDOW: constexpr,
    SOFTCAP: constexpr,
    PDL: constexpr,
):
    """mask: of bytes, or numbers that are added to the scores."""
    ADDED: constexpr = mask.ptr is not None and mask.ptr.dtype.element_ty.is_floating()
    BLOCK_M: constexpr = dot_block(GROUP * T)
    begin(PDL)
    batch = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    m = tl.arange(0, BLOCK_M)
    token = m // GROUP
    head = kv_head * GROUP + m % GROUP
    valid = token < T
    d = tl.arange(0, dot_block(D))[None, :]
    q_at = q.ptr + batch * q.s0 + (token * q.s1 + head * q.s2)[:, None] + d
    queries = tl.load(q_at, mask=valid[:, None] & (d < D), other=0.0)
    k_ptr = k.ptr + batch * k.s0 + kv_head * k.s2
    v_ptr = v.ptr + batch * v.s0 + kv_head * v.s2
    if mask.ptr is not None:
        mask_row = batch * mask.batch + head * mask.head + token * mask.token

    last = num_keys
    if CAUSAL:
        last = tl.minimum(last, T)
    chunk = tl.cdiv(tl.cdiv(last, tl.num_programs(2)), BLOCK_N) * BLOCK_N
    first = split * chunk
    last = tl.minimum(last, first + chunk)
    peak = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if sinks is not None and split == 0:
        peak = tl.load(sinks + head, mask=valid, other=0.0).to(tl.float32) * BASE_2
        total += 1.0
    acc = tl.zeros([BLOCK_M, dot_block(D)], tl.float32)
    for n in range(first, last, BLOCK_N):
        key = n + tl.arange(0, BLOCK_N)
        seen = valid[:, None] & (key < last)[None, :]
        if CAUSAL:
            seen = seen & (key[None, :] <= token[:, None])
        if WINDOW:
            seen = seen & (key[None, :] > token[:, None] - WINDOW)
        if mask.ptr is not None and not ADDED:
            seen = seen & (_mask_values(mask, mask_row, key, seen) != 0)
        if tl.max(seen.to(tl.int32)) > 0:
            there = (key < last)[:, None] & (d < D)
            keys = tl.load(k_ptr + key.to(tl.int64)[:, None] * k.s1 + d, mask=there, other=0.0)
            values = tl.load(v_ptr + key.to(tl.int64)[:, None] * v.s1 + d, mask=there, other=0.0)
            scores = tl.dot(queries, tl.trans(keys), input_precision="ieee")
            if SOFTCAP:
                # cap * tanh(scores / cap), by a sigmoid, which does not overflow.
                scores = 2.0 * tl.sigmoid(scores * inner) - 1.0
            scores = scores * unit
            if ADDED:
                added = _mask_values(mask, mask_row, key, seen).to(tl.float32)
                seen = seen & (added != -float("inf"))
                # Masks of transformers use the smallest finite number, which must not become -inf
                # in base 2.
                scores += tl.maximum(added * BASE_2, -3.4e38)
            scores = tl.where(seen, scores, -float("inf"))
            acc, total, peak = add_weighted(acc, total, peak, scores, values, 1.0, True)

    total = tl.where(total == 0.0, 1.0, total)  # a row that sees no key has the result 0
    acc = acc / total[:, None]
    row = ((batch * T + token) * N + head) * tl.num_programs(2) + split
    store_attended(out_ptr, lse_ptr, acc, total, peak, row, d, valid, True, D)


def refuse_attention(
    platform: Platform, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float
) -> Refusal | None:
    if reason := unfit(platform, q=q, k=k, v=v) or no_bf16_products(platform, q.dtype):
        return reason
    if not isinstance(q.shape[-3], int) or q.shape[-3] * (q.shape[-2] // k.shape[-2]) > MAX_ROWS:
        return Refusal(
            "shape",
            f"more than {MAX_ROWS} query rows share a key/value head",
        )
    if reason := unlike(FLOATS, q=q, k=k, v=v):
        return reason
    if q.shape[-1] != v.shape[-1] or q.shape[-1] > MAX_WIDTH:
        return Refusal(
            "shape",
            f"heads of {q.shape[-1]} and {v.shape[-1]}: written for equal widths up to {MAX_WIDTH}",
        )
    if scale <= 0:
        return Refusal("argument", f"the scale {scale} is not positive")
    if mask is not None and mask.dim() > 4:
        return Refusal("shape", f"the mask has {mask.dim()} dimensions")
    return None


def _tiling(heads: int, num_keys: int, row_bytes: int, device: torch.device) -> tuple[int, int]:
    """The keys of a tile and the splits, for so many pairs of a sequence and a key/value head: as
    many programs as two for each multiprocessor, in tiles as small as leave each program one.
    """
    # H200, us with two tiles of 64 (of 32, if a head has 256 columns) a program / so: 200 keys of a
    # sequence, 4 heads of 256 6.1 / 3.8, 16 of 128 6.3 / 3.7, 32 of 64 5.7 / 3.5; 16 sequences, 32
    # heads of 64 9.1 / 6.8; 4,096 keys, 16 heads of 128 11.4 / 10.3.
    programs = min(max(2 * multiprocessors(device) // heads, 1), MAX_SPLITS)
    largest = min((TILE_BYTES if has_room(device) else TILE_BYTES // 2) // row_bytes, 128)
    block = min(max(triton.next_power_of_2(triton.cdiv(num_keys, programs)), 16), largest)
    return block, max(min(programs, triton.cdiv(num_keys, block)), 1)


@ops.attention.kernel("triton", refuses=refuse_attention)
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    causal: bool,
    window: int,
    softcap: float,
) -> Tensor:
    if not q.numel():
        return q.new_empty(q.shape)
    shape = q.shape
    if q.dim() == 3:
        q, k, v = q[None], k[None], v[None]
    batch, num_new, num_heads, width = q.shape
    num_keys, kv_heads = k.shape[1:3]
    group = num_heads // kv_heads
    block, splits = _tiling(
        batch * kv_heads, num_keys, dot_size(width) * q.element_size(), q.device
    )
    into, lse = empty_splits(q, width, splits)
    of_all = Mask(None)
    if mask is not None:
        stored = mask.view(torch.uint8) if mask.dtype == torch.bool else mask
        of_all = Mask(stored, *mask.expand(batch, num_heads, num_new, num_keys).stride())
    _attend[(batch, kv_heads, splits)](
        *map(rows_of, (q, k, v)),
        of_all,
        sinks,
        into,
        lse,
        num_keys,
        *score_factors(scale, softcap),
        T=num_new,
        N=num_heads,
        GROUP=group,
        D=width,
        BLOCK_N=block,
        CAUSAL=causal,
        WINDOW=window,
        SOFTCAP=softcap != 0.0,
        num_warps=4,
        num_stages=2,
        **overlap(q.device),
    )
    out = into if lse is None else combined(into, lse, q.dtype)
    return out.view(shape)
