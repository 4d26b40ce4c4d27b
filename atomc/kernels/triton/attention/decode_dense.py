"""Attention of few new tokens over dense keys, with any mask, as with a static cache of
transformers.

A program computes all query rows that share a key/value head against one split of the keys. It
reads the mask before the keys, and skips tiles that no row sees. T new tokens, S keys, N query
heads, K key/value heads, G = N / K.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from atomc import ops
from atomc.kernels.checks import no_bf16_products, unlike
from atomc.kernels.triton.attention.attention import LOG2_E, MAX_WIDTH, score_factors
from atomc.kernels.triton.attention.attention_tiles import MAX_SPLITS, multiprocessors
from atomc.kernels.triton.attention.combine_splits import combined, empty_splits
from atomc.kernels.triton.launch.launch import begin, dot_size, overlap, unfit
from atomc.ops.formats import FLOATS
from atomc.ops.op import Refusal
from atomc.platform import Platform

MAX_ROWS = 64  # query rows of one program, G * T
BLOCK_N = 64


@no_type_check
@triton.jit(do_not_specialize=["num_keys"])
def _attend(
    q_ptr,
    k_ptr,
    v_ptr,
    mask_ptr,
    sinks,
    out_ptr,
    lse_ptr,
    num_keys,
    q_batch,
    q_token,
    q_head,
    k_batch,
    k_token,
    k_head,
    v_batch,
    v_token,
    v_head,
    m_batch,
    m_head,
    m_token,
    m_key,
    inner,
    unit,
    T: tl.constexpr,
    N: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASK: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    SPLIT: tl.constexpr,
    LOG2_E: tl.constexpr,
    PDL: tl.constexpr,
):
    """MASK: 0 none, 1 bool, 2 added to the scores."""
    begin(PDL)
    batch = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    m = tl.arange(0, BLOCK_M)
    token = m // GROUP
    head = kv_head * GROUP + m % GROUP
    valid = token < T
    d = tl.arange(0, BLOCK_D)
    q_at = q_ptr + batch * q_batch + (token * q_token + head * q_head)[:, None] + d[None, :]
    q = tl.load(q_at, mask=valid[:, None] & (d < D)[None, :], other=0.0)
    k_ptr += batch * k_batch + kv_head * k_head
    v_ptr += batch * v_batch + kv_head * v_head
    mask_row = batch * m_batch + head * m_head + token * m_token

    last = num_keys
    if CAUSAL:
        last = tl.minimum(last, T)
    chunk = tl.cdiv(tl.cdiv(last, tl.num_programs(2)), BLOCK_N) * BLOCK_N
    first = split * chunk
    last = tl.minimum(last, first + chunk)
    peak = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if SINKS and split == 0:
        peak = tl.load(sinks + head, mask=valid, other=0.0).to(tl.float32) * LOG2_E
        total += 1.0
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for n in range(first, last, BLOCK_N):
        key = n + tl.arange(0, BLOCK_N)
        seen = valid[:, None] & (key < last)[None, :]
        if CAUSAL:
            seen = seen & (key[None, :] <= token[:, None])
        if WINDOW:
            seen = seen & (key[None, :] > token[:, None] - WINDOW)
        if MASK == 1:
            at = mask_ptr + mask_row[:, None] + key.to(tl.int64)[None, :] * m_key
            seen = seen & (tl.load(at, mask=seen, other=0) != 0)
        if tl.max(seen.to(tl.int32)) > 0:
            there = (key < last)[:, None] & (d < D)[None, :]
            k = tl.load(
                k_ptr + key.to(tl.int64)[:, None] * k_token + d[None, :], mask=there, other=0.0
            )
            v = tl.load(
                v_ptr + key.to(tl.int64)[:, None] * v_token + d[None, :], mask=there, other=0.0
            )
            scores = tl.dot(q, tl.trans(k), input_precision="ieee")
            if SOFTCAP:
                # cap * tanh(scores / cap), by a sigmoid, which does not overflow.
                scores = 2.0 * tl.sigmoid(scores * inner) - 1.0
            scores = scores * unit
            if MASK == 2:
                added = tl.load(
                    mask_ptr + mask_row[:, None] + key.to(tl.int64)[None, :] * m_key,
                    mask=seen,
                    other=0.0,
                )
                added = added.to(tl.float32)
                seen = seen & (added != -float("inf"))
                # Masks of transformers use the smallest finite number, which must not become -inf
                # in base 2.
                scores += tl.maximum(added * LOG2_E, -3.4e38)
            scores = tl.where(seen, scores, -float("inf"))
            highest = tl.maximum(peak, tl.max(scores, 1))
            shift = tl.where(highest == -float("inf"), 0.0, highest)
            weights = tl.exp2(scores - shift[:, None])
            decay = tl.exp2(peak - shift)
            total = total * decay + tl.sum(weights, 1)
            acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
            peak = highest

    total = tl.where(total == 0.0, 1.0, total)  # a row that sees no key has the result 0
    acc = acc / total[:, None]
    out_row = ((batch * T + token) * N + head) * tl.num_programs(2) + split
    if SPLIT:
        tl.store(lse_ptr + out_row, peak + tl.log2(total), mask=valid)
    tl.store(
        out_ptr + out_row[:, None] * D + d[None, :],
        acc.to(out_ptr.dtype.element_ty),
        mask=valid[:, None] & (d < D)[None, :],
    )


def refuse_attention(
    platform: Platform,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    *,
    scale: float,
    **_: object,
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


@ops.attention.kernel("triton", refuses=refuse_attention)
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv: Tensor | None = None,
    mask: Tensor | None = None,
    sinks: Tensor | None = None,
    *,
    scale: float,
    causal: bool = True,
    window: int = 0,
    softcap: float = 0.0,
) -> Tensor:
    if not q.numel():
        return q.new_empty(q.shape)
    shape = q.shape
    if q.dim() == 3:
        q, k, v = q[None], k[None], v[None]
    batch, num_new, num_heads, width = q.shape
    num_keys, kv_heads = k.shape[1:3]
    group = num_heads // kv_heads
    # Two programs per multiprocessor, each with at least two tiles of keys.
    programs = 2 * multiprocessors(q.device) // (batch * kv_heads)
    splits = max(min(programs, triton.cdiv(num_keys, 2 * BLOCK_N), MAX_SPLITS), 1)
    into, lse = empty_splits(q, width, splits)
    of_all = None if mask is None else mask.expand(batch, num_heads, num_new, num_keys)
    _attend[(batch, kv_heads, splits)](
        q,
        k,
        v,
        mask.view(torch.uint8) if mask is not None and mask.dtype == torch.bool else mask,
        sinks,
        into,
        lse,
        num_keys,
        *q.stride()[:3],
        *k.stride()[:3],
        *v.stride()[:3],
        *((0, 0, 0, 0) if of_all is None else of_all.stride()),
        *score_factors(scale, softcap),
        T=num_new,
        N=num_heads,
        GROUP=group,
        D=width,
        BLOCK_D=dot_size(width),
        BLOCK_M=dot_size(group * num_new),
        BLOCK_N=BLOCK_N if width <= 128 else BLOCK_N // 2,
        MASK=0 if mask is None else 1 if mask.dtype == torch.bool else 2,
        CAUSAL=causal,
        WINDOW=window,
        SOFTCAP=softcap != 0.0,
        SINKS=sinks is not None,
        SPLIT=splits > 1,
        LOG2_E=LOG2_E,
        num_warps=4,
        num_stages=2,
        **overlap(q.device),
    )
    out = into if lse is None else combined(into, lse, q.dtype)
    return out.view(shape)
