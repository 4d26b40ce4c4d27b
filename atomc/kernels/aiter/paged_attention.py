"""Attention over a paged cache by AITER's Triton kernels, prompts, chunks and single tokens alike.

Everything that the host decides comes from shapes, so that a captured step can be replayed with
other lengths.
"""

import torch
from torch import Tensor

from atomc import ops
from atomc.graph.sizes import known_equal
from atomc.kernels.aiter.kv_write import odd_blocks
from atomc.kernels.aiter.library import FP8_OF, Function, unfit
from atomc.kernels.checks import HALVES, strided, unlike
from atomc.ops.op import Refusal
from atomc.platform import Platform

PLACES = ("aiter.ops.triton.attention.unified_attention", "aiter.ops.triton.unified_attention")
unified_attention = Function("unified_attention", *PLACES, takes=["sinks"])
# Versions that read codes without a scale, too; older ones load the scale that is not there.
unscaled_attention = Function("unified_attention", *PLACES, takes=["sinks", "q_scales"])
# Up to so many keys AITER's kernel walks them in one program a tile. Beyond, it may split them, and
# its second kernel, which joins the parts, writes to rows of no sequence what it finds in memory.
UNSPLIT = 512


def _refuse(
    platform: Platform,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    block_tables: Tensor,
    token: Tensor,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> Refusal | None:
    codes = k_cache.dtype.itemsize == 1
    if reason := unfit(
        platform, unscaled_attention if codes and k_scale is None else unified_attention
    ):
        return reason
    if reason := unlike(HALVES, q=q):
        return reason
    if k_cache.dtype not in (q.dtype, FP8_OF[platform.arch]) or v_cache.dtype != k_cache.dtype:
        return Refusal(
            "dtype",
            f"the cache is {k_cache.dtype}, the query {q.dtype}: AITER reads one like it, or "
            f"{FP8_OF[platform.arch]}",
        )
    if (k_scale is None) != (v_scale is None):
        return Refusal("argument", "AITER takes a scale for keys and for values, or none")
    if not known_equal(k_cache.shape[-1], v_cache.shape[-1]):
        return Refusal("shape", "keys and values differ in width")
    return strided(q=q, k_cache=k_cache, v_cache=v_cache) or odd_blocks(k_cache)


@ops.paged_attention.kernel("aiter", layout="paged", refuses=_refuse)
def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    block_tables: Tensor,
    token: Tensor,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> Tensor:
    rows = q.reshape(-1, *q.shape[-2:])
    out = torch.zeros_like(rows, memory_format=torch.contiguous_format)
    count, sequences = rows.shape[0], seq_lens.shape[0]
    if count and sequences:
        longest = block_tables.shape[1] * k_cache.shape[1]
        splits = not window and longest > UNSPLIT
        # Never 1 new token a sequence: then AITER takes row s for sequence s, but some may have
        # none.
        unified_attention(
            rows,
            k_cache,
            v_cache,
            out,
            query_start,
            max(2, count // sequences),
            seq_lens,
            longest if splits else UNSPLIT,
            scale,
            True,
            (window - 1, 0),
            block_tables,
            softcap,
            None,
            k_scale,
            v_scale,
            sinks=sinks,
        )
        if splits:
            padding = torch.arange(count, device=q.device) >= query_start[-1]
            out.masked_fill_(padding[:, None, None], 0.0)
    return out.view(*q.shape[:-1], v_cache.shape[-1])
