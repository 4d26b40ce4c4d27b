"""Attention over a paged latent cache by AITER's Triton kernels, prompts, chunks and single tokens
alike.
"""

from torch import Tensor

from atomc import ops
from atomc.kernels.aiter.latent.latent_walk import (
    attended_latents,
    refuse_chosen,
    unattended_latents,
)
from atomc.kernels.checks import first_refusal


@ops.mla_absorbed_attention.kernel(
    "aiter", layout="paged", refuses=first_refusal(refuse_chosen, unattended_latents)
)
def mla_absorbed_attention(
    q: Tensor,
    kv_cache: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    block_tables: Tensor,
    kv_scale: Tensor | None,
    latent: int,
    scale: float,
) -> Tensor:
    return attended_latents(
        q, kv_cache, query_start, seq_lens, block_tables, kv_scale, latent, scale
    )
