"""Attention over the "contiguous" layout on a CPU. A sequence is one block, and its keys a slice of
the cache.
"""

from torch import Tensor

from atomc import ops
from atomc.kernels.row_views import as_heads, with_lead
from atomc.kernels.torch.sequence import attend, refuse_paged_attention, sequences


@ops.paged_attention.kernel("torch", layout="contiguous", refuses=refuse_paged_attention)
def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    block_tables: Tensor,
    sinks: Tensor | None,
    scale: float,
    window: int,
    softcap: float,
) -> Tensor:
    rows = as_heads(q)
    out = q.new_zeros((*rows.shape[:-1], v_cache.shape[-1]))
    block = block_tables[:, 0].tolist()
    for s, new, first, length in sequences(query_start, seq_lens, window):
        keys, values = k_cache[block[s], first:length], v_cache[block[s], first:length]
        out[new] = attend(rows[new], keys, values, sinks, scale, window, softcap)
    return with_lead(out, q)
