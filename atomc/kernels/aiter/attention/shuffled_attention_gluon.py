"""Attention of decode steps over a shuffled cache in Gluon, with sinks, windows and codes. Other
steps take AITER's kernels for long prompts, or those in Triton.
"""

import torch
from torch import Tensor

from atomc import ops
from atomc.kernels.aiter.attention.paged_attention import attended_prompts, ungathered
from atomc.kernels.aiter.attention.shuffled_cache import shuffled_views
from atomc.kernels.aiter.attention.unified_attention import (
    attended,
    blank_padding,
    unattended_shuffled,
)
from atomc.kernels.aiter.library import Function, installed
from atomc.kernels.aiter.rows.kv_write import scaled_values
from atomc.kernels.checks import first_refusal, named, too_wide, unsupported
from atomc.kernels.row_views import as_heads

PLACE = "aiter.ops.triton.gluon.pa_decode_gluon"
pa_decode_gluon = Function("pa_decode_gluon", PLACE, takes=["sinks", "sliding_window", "ps"])
get_recommended_splits = Function("get_recommended_splits", PLACE)
MOST_SHARING = 64  # query heads that share a key head


@ops.paged_attention.kernel(
    "aiter",
    layout="shuffled",
    refuses=first_refusal(
        installed(pa_decode_gluon, get_recommended_splits),
        lambda q, k_cache: too_wide(
            q.shape[-2] // k_cache.shape[2], MOST_SHARING, "groups of heads"
        ),
        named("softcap", unsupported, "AITER's Gluon kernel"),
        scaled_values,
        ungathered,
        unattended_shuffled,
    ),
)
def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    block_tables: Tensor,
    sinks: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    scale: float,
    window: int,
) -> Tensor:
    rows = as_heads(q)
    if rows.numel() and rows.shape[0] == seq_lens.shape[0]:
        out = torch.empty_like(rows, memory_format=torch.contiguous_format)
        keys, values = shuffled_views(k_cache, v_cache)
        if k_scale is None and k_cache.dtype != q.dtype:  # it knows codes by their scales
            k_scale = v_scale = q.new_ones(1, dtype=torch.float32)
        pa_decode_gluon(
            out,
            rows.contiguous(),
            keys,
            values,
            seq_lens,
            block_tables,
            scale,
            1,
            get_recommended_splits(rows.shape[0], keys.shape[1]),
            compute_type=q.dtype,
            key_scale=k_scale,
            value_scale=v_scale,
            sinks=sinks,
            # AITER counts the place behind the last key to the window.
            sliding_window=window + 1 if window else 0,
            ps=True,
        )
        blank_padding(out, query_start, seq_lens)
        return out.view(q.shape)
    step = query_start, seq_lens, block_tables
    if sinks is None and k_cache.dtype == q.dtype:
        return attended_prompts(q, k_cache, v_cache, *step, scale, window, shuffled=True)
    operands = q, k_cache, v_cache, *step, sinks, k_scale, v_scale
    return attended(*operands, scale=scale, window=window, shuffled=True)
