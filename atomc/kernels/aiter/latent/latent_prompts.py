"""Latent attention over keys and values that are computed from the latents, by AITER's kernels for
dense keys (CK, or assembly where it has one for the widths): without state, and over a paged cache
for steps with prompts. Keys may be wider than values.

The rows of the cache of all sequences are gathered first. Where the block tables have room for many
more keys than the step has rows, AITER's Triton kernels walk the latents instead.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from atomc import ops
from atomc.kernels.aiter.attention.attention import WIDEST, flash_attn_func
from atomc.kernels.aiter.attention.paged_attention import (
    KEYS_PER_ROW,
    flash_attn_varlen_func,
    slots_of_keys,
)
from atomc.kernels.aiter.latent.latent_walk import (
    attended_latents,
    refuse_chosen,
    unattended_latents,
)
from atomc.kernels.aiter.library import installed
from atomc.kernels.checks import first_refusal, named, scattered_blocks, unlike, wrong_rank
from atomc.kernels.row_views import as_heads, with_lead
from atomc.ops.attention import loaded_values
from atomc.ops.formats import HALVES
from atomc.ops.op import Refusal
from atomc.platform import Platform

# As for NVIDIA GPUs: from here on a step has prompts. Not measured on an AMD GPU.
PROMPTS = ops.Tokens(257)


def _odd_widths(key: int, value: int) -> Refusal | None:
    if key % 8 == 0 and value % 8 == 0 and value <= key <= WIDEST:
        return None
    return Refusal(
        "shape",
        f"keys of {key} columns and values of {value}: AITER takes multiples of 8 up to {WIDEST}, "
        "and values that are not wider than keys",
    )


def _expanded(
    latents: Tensor, k_rope: Tensor, weight: Tensor, heads: int, nope: int
) -> list[Tensor]:
    """Keys [..., H, P + R] and values [..., H, V] of latents [..., L] and k_rope [..., 1, R]."""
    both = F.linear(latents, weight).view(*latents.shape[:-1], heads, weight.shape[0] // heads)
    rotated = k_rope.expand(*both.shape[:-1], k_rope.shape[-1])
    return [torch.cat((both[..., :nope], rotated), -1), both[..., nope:].contiguous()]


def _odd_heads(q_nope: Tensor, q_rope: Tensor, weight: Tensor) -> Refusal | None:
    heads, nope = q_nope.shape[-2:]
    return _odd_widths(nope + q_rope.shape[-1], weight.shape[0] // heads - nope)


@ops.mla_attention.kernel(
    "aiter",
    refuses=first_refusal(
        refuse_chosen,
        installed(flash_attn_func),
        named("q_nope q_rope latent k_rope", unlike, HALVES),
        named("q_nope", wrong_rank, (3, 4)),
        _odd_heads,
    ),
)
def mla_attention(
    q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, weight: Tensor, scale: float
) -> Tensor:
    heads, nope = q_nope.shape[-2:]
    value = weight.shape[0] // heads - nope
    if not q_nope.numel():
        return q_nope.new_empty((*q_nope.shape[:-1], value))
    operands = [
        torch.cat((q_nope, q_rope), -1),
        *_expanded(latent, k_rope, weight, heads, nope),
    ]
    with torch.no_grad():  # it is an autograd function
        out: Tensor = flash_attn_func(
            *(x if x.dim() == 4 else x.unsqueeze(0) for x in operands),
            softmax_scale=scale,
            causal=True,
            window_size=(-1, -1, 0),
        )
    return with_lead(out.contiguous(), q_nope)


def _odd_cached_heads(q: Tensor, weight: Tensor, kv_cache: Tensor) -> Refusal | None:
    heads, width = q.shape[-2:]
    nope = width - (kv_cache.shape[-1] - weight.shape[-1])
    return _odd_widths(width, weight.shape[0] // heads - nope)


def _unwalked(
    platform: Platform, q: Tensor, weight: Tensor, kv_cache: Tensor, kv_scale: Tensor | None
) -> Refusal | None:
    return unattended_latents(platform, q, kv_cache, kv_scale, weight.shape[-1])


@ops.mla_paged_attention.kernel(
    "aiter",
    layout="paged",
    tokens=PROMPTS,
    refuses=first_refusal(
        refuse_chosen,
        installed(flash_attn_varlen_func),
        _odd_cached_heads,
        lambda kv_cache: scattered_blocks(kv_cache),
        _unwalked,
    ),
)
def mla_paged_attention(
    q: Tensor,
    weight: Tensor,
    kv_cache: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    block_tables: Tensor,
    kv_scale: Tensor | None,
    scale: float,
) -> Tensor:
    rows = as_heads(q)
    room = block_tables.numel() * kv_cache.shape[1]
    step = query_start, seq_lens, block_tables, kv_scale
    if 0 < room <= KEYS_PER_ROW * rows.shape[0]:
        return with_lead(_attend_keys(rows, weight, kv_cache, *step, scale), q)
    # With the projections absorbed (DeepSeek-V2, section 2.1.2).
    heads, latent = rows.shape[1], weight.shape[-1]
    nope = q.shape[-1] - (kv_cache.shape[-1] - latent)
    of_head = weight.view(heads, -1, latent)
    projected = torch.bmm(rows[..., :nope].transpose(0, 1), of_head[:, :nope]).transpose(0, 1)
    queries = torch.cat((projected, rows[..., nope:]), -1)
    attended = attended_latents(queries, kv_cache, *step, latent, scale)
    return with_lead(ops.linear_by_head.reference(attended, of_head[:, nope:]), q)


def _attend_keys(
    q: Tensor,
    weight: Tensor,
    kv_cache: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    block_tables: Tensor,
    kv_scale: Tensor | None,
    scale: float,
) -> Tensor:
    """Attention of q [T, H, P + R] over keys and values of all sequences -> [T, H, V]."""
    heads, latent = q.shape[1], weight.shape[-1]
    nope = q.shape[-1] - (kv_cache.shape[-1] - latent)
    key_start = torch.zeros_like(query_start)
    torch.cumsum(seq_lens, 0, dtype=key_start.dtype, out=key_start[1:])
    slots = slots_of_keys(key_start, block_tables, kv_cache.shape[1])
    cached = loaded_values(kv_cache.flatten(0, 1).index_select(0, slots), kv_scale, q.dtype)
    k, v = _expanded(cached[:, :latent], cached[:, None, latent:], weight, heads, nope)
    out = q.new_zeros((q.shape[0], heads, v.shape[-1]))  # rows of no sequence stay 0
    with torch.no_grad():  # it is an autograd function
        flash_attn_varlen_func(
            q.contiguous(),
            k,
            v,
            query_start,
            key_start,
            q.shape[0],
            slots.shape[0],
            softmax_scale=scale,
            causal=True,
            window_size=(-1, -1, 0),
            out=out,
        )
    return out
