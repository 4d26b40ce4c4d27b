"""AITER's Triton attention over paged caches: what it refuses, and how it is called. Kernels in
`paged_attention_triton` and its neighbours take it for all that theirs do not serve.

Everything that the host decides comes from shapes, so that a captured step can be replayed with
other lengths. As many rows as sequences are a decode step (atomc.ops.paged_attention).
"""

from typing import TypedDict

import torch
from torch import Tensor

from atomc.graph.sizes import known_equal
from atomc.kernels.aiter.attention.shuffled_cache import shuffled_views, unshuffled
from atomc.kernels.aiter.library import Function, installed, unfit
from atomc.kernels.aiter.rows.kv_write import foreign_cache, odd_blocks, odd_heads
from atomc.kernels.checks import first_refusal, strided, unlike
from atomc.kernels.row_views import as_heads
from atomc.ops.formats import HALVES
from atomc.ops.op import Refusal
from atomc.platform import Platform

PLACES = ("aiter.ops.triton.attention.unified_attention", "aiter.ops.triton.unified_attention")
unified_attention = Function("unified_attention", *PLACES, takes=["sinks"])
# Versions that read codes without a scale, too; older ones load the scale that is not there.
unscaled_attention = Function("unified_attention", *PLACES, takes=["sinks", "q_scales"])
# Versions that read the shuffled layout.
shuffled_attention = Function("unified_attention", *PLACES, takes=["sinks", "shuffled_kv_cache"])
# Up to so many keys AITER's kernel walks them in one program a tile. Beyond, it may split them, and
# its second kernel, which joins the parts, writes to rows of no sequence what it finds in memory.
UNSPLIT = 512


class Attended(TypedDict):
    """The arguments of paged_attention that `attended` takes."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    query_start: Tensor
    seq_lens: Tensor
    block_tables: Tensor
    sinks: Tensor | None
    k_scale: Tensor | None
    v_scale: Tensor | None
    scale: float
    window: int
    softcap: float


def unattended(
    platform: Platform,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> Refusal | None:
    """Why `attended` does not serve these."""
    codes = k_cache.dtype.itemsize == 1
    if reason := unfit(
        platform, unscaled_attention if codes and k_scale is None else unified_attention
    ):
        return reason
    if reason := unlike(HALVES, q=q) or foreign_cache(platform, q, k_cache, v_cache):
        return reason
    if (k_scale is None) != (v_scale is None):
        return Refusal("argument", "AITER takes a scale for keys and for values, or none")
    if not known_equal(k_cache.shape[-1], v_cache.shape[-1]):
        return Refusal("shape", "keys and values differ in width")
    return strided(q=q) or odd_blocks(k_cache)


# Why `attended` does not serve these in the shuffled layout.
unattended_shuffled = first_refusal(
    installed(shuffled_attention), odd_heads, unattended, unshuffled
)


def attended(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    block_tables: Tensor,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    shuffled: bool = False,
) -> Tensor:
    """paged_attention. shuffled: the layout of the caches."""
    rows = as_heads(q)
    out = torch.zeros_like(rows, memory_format=torch.contiguous_format)
    count, sequences = rows.shape[0], seq_lens.shape[0]
    if not count or not sequences:
        return out.view(q.shape)
    longest = block_tables.shape[1] * k_cache.shape[1]
    splits = not window and longest > UNSPLIT
    # 1: row s is taken for sequence s.
    most = 1 if count == sequences else max(2, count // sequences)
    unified_attention(
        rows,
        *(shuffled_views(k_cache, v_cache) if shuffled else (k_cache, v_cache)),
        out,
        query_start,
        most,
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
        **({"shuffled_kv_cache": True} if shuffled else {}),
    )
    if splits or most == 1:
        blank_padding(out, query_start, seq_lens)
    return out.view(q.shape)


def blank_padding(out: Tensor, query_start: Tensor, seq_lens: Tensor) -> None:
    """Zero the rows of no sequence."""
    if out.shape[0] == seq_lens.shape[0]:
        padding = seq_lens == 0
    else:
        padding = torch.arange(out.shape[0], device=out.device) >= query_start[-1]
    out.masked_fill_(padding[:, None, None], 0.0)
