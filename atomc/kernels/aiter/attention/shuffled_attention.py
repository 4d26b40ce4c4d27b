"""Attention of decode steps over a shuffled cache in assembly, for heads of 128. Other steps take
AITER's kernels for long prompts, or those in Triton.
"""

import math

from torch import Tensor

from atomc import ops
from atomc.kernels.aiter.attention.paged_attention import attended_prompts, flash_attn_varlen_func
from atomc.kernels.aiter.attention.shuffled_cache import shuffled_views
from atomc.kernels.aiter.attention.unified_attention import blank_padding, unattended_shuffled
from atomc.kernels.aiter.library import Function, installed
from atomc.kernels.aiter.rows.kv_write import scaled_values
from atomc.kernels.checks import first_refusal, named, strided, unlike, unsupported
from atomc.kernels.row_views import as_heads
from atomc.ops.formats import HALVES
from atomc.ops.op import Refusal

pa_fwd_asm = Function("pa_fwd_asm", "aiter", takes=["Q", "K", "V"])
# What its assembly is written for: the width of a head, by which it scales, and query heads that
# share a key head.
WIDTH, MOST_SHARING = 128, 16


def _unwritten(q: Tensor, k_cache: Tensor, scale: float) -> Refusal | None:
    """Why there is no assembly for such heads, or with another scale."""
    heads, width = q.shape[-2:]
    sharing = heads // k_cache.shape[2]
    if width != WIDTH or sharing > MOST_SHARING:
        return Refusal(
            "shape",
            f"{sharing} heads of {width} share a key head: AITER's assembly takes heads of "
            f"{WIDTH}, up to {MOST_SHARING}",
        )
    if not math.isclose(scale, WIDTH**-0.5, rel_tol=1e-6):
        return Refusal("argument", f"AITER's assembly scales by 1 / sqrt({WIDTH})")
    return None


@ops.paged_attention.kernel(
    "aiter",
    layout="shuffled",
    refuses=first_refusal(
        installed(pa_fwd_asm, flash_attn_varlen_func),
        _unwritten,
        named("sinks window softcap", unsupported, "AITER's assembly"),
        # Of codes it reads a scale a token and head, which the cache does not have.
        named("q k_cache v_cache", unlike, HALVES),
        scaled_values,
        unattended_shuffled,
        named("block_tables", strided),
    ),
)
def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    block_tables: Tensor,
    scale: float,
) -> Tensor:
    rows = as_heads(q)
    if rows.numel() and rows.shape[0] == seq_lens.shape[0]:
        out: Tensor = pa_fwd_asm(
            rows.contiguous(),
            *shuffled_views(k_cache, v_cache),
            block_tables,
            seq_lens,
            block_tables.stride(0),
        )
        blank_padding(out, query_start, seq_lens)
        return out.view(q.shape)
    step = query_start, seq_lens, block_tables
    return attended_prompts(q, k_cache, v_cache, *step, scale, shuffled=True)
