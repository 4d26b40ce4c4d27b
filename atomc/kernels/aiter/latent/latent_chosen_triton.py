"""Attention over chosen rows of a paged latent cache by AITER's Triton kernel (DeepSeek-V3.2), with
the projections of keys and values absorbed.

It takes heads by 16: rows of zeros are added, and their results dropped.
"""

import torch.nn.functional as F
from torch import Tensor

from atomc import ops
from atomc.kernels.aiter.latent.latent_chosen import chosen_slots, refuse_all_keys
from atomc.kernels.aiter.latent.latent_walk import unwalkable, visible_keys
from atomc.kernels.aiter.library import Function, installed
from atomc.kernels.checks import first_refusal, named, unlike
from atomc.kernels.row_views import as_heads, with_lead
from atomc.ops.formats import HALVES

unified_attention_sparse_mla = Function(
    "unified_attention_sparse_mla",
    "aiter.ops.triton.attention.unified_attention_sparse_mla",
    "aiter.ops.triton.unified_attention_sparse_mla",
)
HEADS = 16


@ops.mla_absorbed_attention.kernel(
    "aiter",
    layout="paged",
    refuses=first_refusal(
        refuse_all_keys,
        installed(unified_attention_sparse_mla),
        named("q kv_cache", unlike, HALVES),
        unwalkable,
    ),
)
def mla_absorbed_attention(
    q: Tensor,
    kv_cache: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    block_tables: Tensor,
    latent: int,
    scale: float,
    chosen: Tensor | None,
) -> Tensor:
    assert chosen is not None
    rows, by_row = as_heads(q), chosen.flatten(0, -2)
    tokens, heads, _ = rows.shape
    out = q.new_zeros((tokens, heads + -heads % HEADS, latent))
    if tokens and seq_lens.shape[0]:
        sequence_of_row, _ = visible_keys(tokens, query_start, seq_lens)
        unified_attention_sparse_mla(
            F.pad(rows, (0, 0, 0, -heads % HEADS)),
            kv_cache.unsqueeze(2),
            out,
            query_start,
            tokens,
            seq_lens,
            block_tables.shape[1] * kv_cache.shape[1],
            scale,
            chosen_slots(by_row, sequence_of_row, block_tables, kv_cache.shape[1]),
            block_tables,
            latent,
        )
    return with_lead(out[:, :heads].contiguous(), q)
