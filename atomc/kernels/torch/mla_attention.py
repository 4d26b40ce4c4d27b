"""Multi-head latent attention by scaled_dot_product_attention, without state or over a paged latent
cache, on any device.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from atomc import ops
from atomc.kernels.torch.attention import attention
from atomc.kernels.torch.sequence import attend, sequences
from atomc.ops.attention import from_cache


@ops.mla_attention.kernel("torch")
def mla_attention(
    q_nope: Tensor,
    q_rope: Tensor,
    latent: Tensor,
    k_rope: Tensor,
    weight: Tensor,
    kv: Tensor | None = None,
    *,
    scale: float,
) -> Tensor:
    heads, nope = q_nope.shape[-2:]
    both = F.linear(latent, weight).view(*latent.shape[:-1], heads, weight.shape[0] // heads)
    k = torch.cat((both[..., :nope], k_rope.expand(*both.shape[:-1], k_rope.shape[-1])), -1)
    out: Tensor = attention(torch.cat((q_nope, q_rope), -1), k, both[..., nope:], scale=scale)
    return out


@ops.mla_absorbed_attention.kernel("torch", layout="paged", syncs=True)
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
) -> Tensor:
    rows = q.reshape(-1, *q.shape[-2:])
    out = q.new_zeros((*rows.shape[:-1], latent))
    # In 16 bits, values times a scale would be rounded.
    wide = q.dtype if kv_scale is None else torch.float32
    for s, new, _, length in sequences(query_start, seq_lens, 0):
        blocks = block_tables[s, : -(-length // kv_cache.shape[1])]
        found = kv_cache.index_select(0, blocks).flatten(0, 1)[:length]
        keys = from_cache(found, kv_scale, wide).unsqueeze(1)
        # With the whole rows as values, scaled_dot_product_attention has one width on a CPU, where
        # it has a fused kernel for that alone.
        out[new] = attend(rows[new].to(wide), keys, keys, None, scale, 0, 0.0)[..., :latent]
    return out.view(*q.shape[:-1], latent)
