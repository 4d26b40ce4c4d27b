"""Attention over a paged latent cache by AITER's Triton kernels, prompts, chunks and single tokens
alike.
"""

from torch import Tensor

from atomc import ops
from atomc.kernels.aiter.latent.latent_walk import attended_latents, unattended_latents
from atomc.kernels.checks import unsupported
from atomc.ops.op import Refusal
from atomc.platform import Platform


def _refuse(
    platform: Platform,
    q: Tensor,
    kv_cache: Tensor,
    kv_scale: Tensor | None,
    latent: int,
    chosen: Tensor | None,
    **_: object,
) -> Refusal | None:
    return unsupported("AITER's attention over all keys", chosen=chosen) or unattended_latents(
        platform, q, kv_cache, kv_scale, latent
    )


@ops.mla_absorbed_attention.kernel("aiter", layout="paged", refuses=_refuse)
def mla_absorbed_attention(
    q: Tensor,
    kv_cache: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    block_tables: Tensor,
    token: Tensor,
    kv_scale: Tensor | None = None,
    *,
    latent: int,
    scale: float,
    chosen: Tensor | None = None,
) -> Tensor:
    out = attended_latents(
        q.reshape(-1, *q.shape[-2:]),
        kv_cache,
        query_start,
        seq_lens,
        block_tables,
        kv_scale,
        latent,
        scale,
    )
    return out.view(*q.shape[:-1], latent)
