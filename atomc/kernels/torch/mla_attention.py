"""Multi-head latent attention by scaled_dot_product_attention, without state or over a paged latent
cache, on any device.
"""

from collections.abc import Iterator
from typing import Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from atomc import ops
from atomc.kernels.checks import first_refusal, named, not_a_cpu, unsupported
from atomc.kernels.row_views import as_heads, with_lead
from atomc.kernels.torch.attention import attention
from atomc.kernels.torch.sequence import attend, sequences
from atomc.ops.attention import PagedSequences, loaded_values

# From this number of tokens on, a step has prompts, whose keys and values are worth computing: a
# decode step of that many sequences is rare. Not measured.
PROMPTS = ops.Tokens(257)
GATHERED = 16  # tokens whose chosen rows are copied at a time


@ops.linear_by_head.kernel("torch")
def linear_by_head(x: Tensor, weight: Tensor) -> Tensor:
    rows = as_heads(x)
    out = x.new_empty((*rows.shape[:-1], weight.shape[1]))
    # Without `out`, heads would be before tokens in memory.
    torch.bmm(rows.transpose(0, 1), weight.transpose(1, 2), out=out.transpose(0, 1))
    return with_lead(out, x)


@ops.mla_attention.kernel("torch")
def mla_attention(
    q_nope: Tensor,
    q_rope: Tensor,
    latent: Tensor,
    k_rope: Tensor,
    weight: Tensor,
    scale: float,
    chosen: Tensor | None,
) -> Tensor:
    heads, nope = q_nope.shape[-2:]
    both = F.linear(latent, weight).view(*latent.shape[:-1], heads, weight.shape[0] // heads)
    k = torch.cat((both[..., :nope], k_rope.expand(*both.shape[:-1], k_rope.shape[-1])), -1)
    mask = None if chosen is None else ops.chosen_mask.reference(chosen)
    q = torch.cat((q_nope, q_rope), -1)
    out: Tensor = attention(q, k, both[..., nope:], None, mask, scale=scale)
    return out


@ops.mla_absorbed_attention.kernel("torch", layout="paged", syncs=True)
def mla_absorbed_attention(
    q: Tensor,
    kv_cache: Tensor,
    kv_scale: Tensor | None,
    latent: int,
    scale: float,
    chosen: Tensor | None,
    **sequences: Unpack[PagedSequences],
) -> Tensor:
    rows = as_heads(q)
    out = q.new_zeros((*rows.shape[:-1], latent))
    # In 16 bits, values times a scale would be rounded.
    wide = q.dtype if kv_scale is None else torch.float32
    by_row = None if chosen is None else chosen.flatten(0, -2)
    for new, found in gathered_latents(kv_cache, **sequences):
        cached, queries = loaded_values(found, kv_scale, wide), rows[new].to(wide)
        # Fewer tokens than are chosen read all of them.
        if by_row is None or len(found) <= by_row.shape[-1]:
            out[new] = _attend_latents(queries, cached, latent, scale)
        else:
            out[new] = _attend_chosen(queries, cached, by_row[new], latent, scale)
    return with_lead(out, q)


@ops.mla_paged_attention.kernel(
    "torch",
    layout="paged",
    tokens=PROMPTS,
    refuses=first_refusal(
        not_a_cpu, named("chosen", unsupported, "a kernel that computes keys and values")
    ),
    syncs=True,
)
def mla_paged_attention(
    q: Tensor,
    weight: Tensor,
    kv_cache: Tensor,
    kv_scale: Tensor | None,
    scale: float,
    **sequences: Unpack[PagedSequences],
) -> Tensor:
    rows = as_heads(q)
    heads, latent = q.shape[-2], weight.shape[-1]
    of_head = weight.view(heads, weight.shape[0] // heads, latent)
    nope = q.shape[-1] - (kv_cache.shape[-1] - latent)
    out = q.new_zeros((*rows.shape[:-1], of_head.shape[1] - nope))
    for new, found in gathered_latents(kv_cache, **sequences):
        cached = loaded_values(found, kv_scale, q.dtype)
        form = _expanded if expands(new.stop - new.start, len(found), of_head) else _absorbed
        out[new] = form(rows[new], of_head, cached, nope, scale)
    return with_lead(out, q)


def gathered_latents(
    kv_cache: Tensor, query_start: Tensor, seq_lens: Tensor, block_tables: Tensor
) -> Iterator[tuple[slice, Tensor]]:
    """(rows of q, rows of the cache) of each sequence with new tokens."""
    for s, new, _, length in sequences(query_start, seq_lens, 0):
        blocks = block_tables[s, : -(-length // kv_cache.shape[1])]
        yield new, kv_cache.index_select(0, blocks).flatten(0, 1)[:length]


def expands(new: int, length: int, of_head: Tensor) -> bool:
    """Whether the keys and values of `length` tokens take fewer multiplications than `new` queries
    and results in the latent space. of_head [H, P + V, L].

    A key and its value take P + V columns of L in each form: here for all tokens, there for the new
    ones. A pair of a query and a key takes P + R + V here, and L + R + L there. DeepSeek-V3, by a
    long context: from 171 new tokens on.
    """
    _, outputs, latent = of_head.shape
    pairs = new * length - new * (new - 1) // 2
    return (length - new) * outputs * latent <= pairs * (2 * latent - outputs)


def _expanded(q: Tensor, of_head: Tensor, cached: Tensor, nope: int, scale: float) -> Tensor:
    """Attention of the queries [T, H, P + R] of a sequence over keys and values that are computed
    from its rows of the cache [S, L + R].
    """
    heads, outputs, latent = of_head.shape
    both = F.linear(cached[:, :latent], of_head.flatten(0, 1)).view(-1, heads, outputs)
    k_rope = cached[:, None, latent:].expand(-1, heads, -1)
    k = torch.cat((both[..., :nope], k_rope), -1)
    return attend(q, k, both[..., nope:], None, scale, 0, 0.0)


def _absorbed(q: Tensor, of_head: Tensor, cached: Tensor, nope: int, scale: float) -> Tensor:
    """The same with queries and results in the latent space."""
    projected = linear_by_head(q[..., :nope], of_head[:, :nope].transpose(1, 2))
    attended = _attend_latents(
        torch.cat((projected, q[..., nope:]), -1), cached, of_head.shape[-1], scale
    )
    return linear_by_head(attended, of_head[:, nope:])


def _attend_latents(q: Tensor, cached: Tensor, latent: int, scale: float) -> Tensor:
    """Attention of q [T, H, L + R] over the rows of the cache of a sequence [S, L + R]."""
    # With whole rows as values, scaled_dot_product_attention has one width on a CPU, where it has a
    # fused kernel for that alone.
    keys = cached.unsqueeze(1)
    return attend(q, keys, keys, None, scale, 0, 0.0)[..., :latent]


def _attend_chosen(q: Tensor, cached: Tensor, chosen: Tensor, latent: int, scale: float) -> Tensor:
    """The same over the chosen rows of each query, [T, K]; -1: none."""
    parts = zip(torch.split(q, GATHERED), torch.split(chosen, GATHERED), strict=True)
    return torch.cat([_gathered_by_token(*part, cached, latent, scale) for part in parts])


def _gathered_by_token(
    q: Tensor, chosen: Tensor, cached: Tensor, latent: int, scale: float
) -> Tensor:
    keys = cached[chosen.clamp(min=0)].to(torch.float32)
    scores = q.to(torch.float32) @ keys.transpose(-1, -2) * scale
    weights = scores.masked_fill(chosen[:, None] < 0, float("-inf")).softmax(-1)
    return (weights @ keys[..., :latent]).to(q.dtype)
