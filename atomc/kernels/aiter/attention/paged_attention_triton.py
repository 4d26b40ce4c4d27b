"""Attention over a paged cache by AITER's Triton kernels, prompts, chunks and single tokens
alike.
"""

from torch import Tensor

from atomc import ops
from atomc.kernels.aiter.attention.unified_attention import attended, unattended


@ops.paged_attention.kernel("aiter", layout="paged", refuses=unattended)
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
    softcap: float,
) -> Tensor:
    return attended(
        q,
        k_cache,
        v_cache,
        query_start,
        seq_lens,
        block_tables,
        sinks,
        k_scale,
        v_scale,
        scale=scale,
        window=window,
        softcap=softcap,
    )
