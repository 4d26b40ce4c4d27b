"""Latent attention over keys and values that are computed from the latents, by AITER's kernels for
dense keys (CK, or assembly where it has one for the widths): without state, and over a paged cache
for steps with prompts. Keys may be wider than values.

The rows of the cache of all sequences are gathered first. Where the block tables have room for many
more keys than the step has rows, AITER's Triton kernels walk the latents instead.

Over a weight in fp8 by blocks or in MXFP4, the gathered latents are quantized, and one function of
AITER multiplies, splits and joins; where latents are walked, the weight is dequantized in the call.
"""

from collections.abc import Callable

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
from atomc.kernels.aiter.library import installed, unfit
from atomc.kernels.aiter.linear import linear_shuffled_split_cat as fp8
from atomc.kernels.aiter.linear import linear_shuffled_split_cat_mxfp4 as mxfp4
from atomc.kernels.aiter.linear.packing import plain_weight
from atomc.kernels.aiter.rows.quant import quant_fp8_group, refuse_group
from atomc.kernels.aiter.rows.quant_triton import quant_mxfp4, refuse_quant_mxfp4
from atomc.kernels.checks import first_refusal, named, scattered_blocks, unlike, wrong_rank
from atomc.kernels.row_views import as_heads, with_lead
from atomc.ops.attention import loaded_values
from atomc.ops.formats import HALVES
from atomc.ops.kv_b_weight import STORED
from atomc.ops.op import Prepared, Refusal
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
) -> tuple[Tensor, Tensor]:
    """Keys [..., H, P + R] and values [..., H, V] of latents [..., L] and k_rope [..., 1, R]."""
    both = F.linear(latents, weight).view(*latents.shape[:-1], heads, weight.shape[0] // heads)
    rotated = k_rope.expand(*both.shape[:-1], k_rope.shape[-1])
    return torch.cat((both[..., :nope], rotated), -1), both[..., nope:].contiguous()


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
    heads, latent = q.shape[-2], weight.shape[-1]
    nope = q.shape[-1] - (kv_cache.shape[-1] - latent)

    def expanded(latents: Tensor, k_rope: Tensor) -> tuple[Tensor, Tensor]:
        return _expanded(latents, k_rope, weight, heads, nope)

    step = query_start, seq_lens, block_tables
    return _attended(q, kv_cache, step, kv_scale, nope, scale, expanded, lambda: weight)


def _attended(
    q: Tensor,
    kv_cache: Tensor,
    step: tuple[Tensor, Tensor, Tensor],
    kv_scale: Tensor | None,
    nope: int,
    scale: float,
    expanded: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    weight: Callable[[], Tensor],
) -> Tensor:
    """mla_paged_attention.

    step      query_start, seq_lens and block_tables
    expanded  of latents [S, L] and rotated keys [S, 1, R], the keys and values of all heads
    weight    () -> kv_b_proj [H * (P + V), L], for steps with more keys
    """
    rows, block_tables = as_heads(q), step[2]
    room = block_tables.numel() * kv_cache.shape[1]
    latent = kv_cache.shape[-1] - (q.shape[-1] - nope)
    if 0 < room <= KEYS_PER_ROW * rows.shape[0]:
        out = _attend_keys(rows, kv_cache, *step, kv_scale, latent, scale, expanded)
        return with_lead(out, q)
    # With the projections absorbed (DeepSeek-V2, section 2.1.2).
    of_head = weight().view(q.shape[-2], -1, latent)
    projected = torch.bmm(rows[..., :nope].transpose(0, 1), of_head[:, :nope]).transpose(0, 1)
    queries = torch.cat((projected, rows[..., nope:]), -1)
    attended = attended_latents(queries, kv_cache, *step, kv_scale, latent, scale)
    return with_lead(ops.linear_by_head.reference(attended, of_head[:, nope:]), q)


def _attend_keys(
    q: Tensor,
    kv_cache: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    block_tables: Tensor,
    kv_scale: Tensor | None,
    latent: int,
    scale: float,
    expanded: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
) -> Tensor:
    """Attention of q [T, H, P + R] over keys and values of all sequences -> [T, H, V]."""
    key_start = torch.zeros_like(query_start)
    torch.cumsum(seq_lens, 0, dtype=key_start.dtype, out=key_start[1:])
    slots = slots_of_keys(key_start, block_tables, kv_cache.shape[1])
    cached = loaded_values(kv_cache.flatten(0, 1).index_select(0, slots), kv_scale, q.dtype)
    k, v = expanded(cached[:, :latent], cached[:, None, latent:])
    out = q.new_zeros((*q.shape[:-1], v.shape[-1]))  # rows of no sequence stay 0
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


def _refuse_quantized(
    platform: Platform,
    q: Tensor,
    weight: Tensor,
    kv_cache: Tensor,
    kv_scale: Tensor | None,
    scheme: str,
    dtype: torch.dtype,
    rounding: str,
) -> Refusal | None:
    if reason := unfit(platform, flash_attn_varlen_func):
        return reason
    latent = weight.shape[-1] * STORED[scheme]
    nope = q.shape[-1] - (kv_cache.shape[-1] - latent)
    x, operands = q.new_empty((1, latent)), {"weight": weight, "k_pe": q, "out_dtype": q.dtype}
    if scheme == "mxfp4":
        reason = mxfp4.refuse_tiles(
            platform=platform, scheme=scheme, **operands
        ) or refuse_quant_mxfp4(platform=platform, x=x, rounding=rounding)
    else:
        reason = fp8.refuse_tiles(
            platform=platform, scheme=scheme, x=weight, **operands
        ) or refuse_group(platform=platform, x=x, dtype=dtype, group=128)
    return (
        reason
        or _odd_widths(q.shape[-1], weight.shape[0] // q.shape[-2] - nope)
        or unattended_latents(platform, q, kv_cache, kv_scale, latent)
    )


def _tiles(weight: Tensor, weight_scale: Tensor, scheme: str) -> Prepared:
    """Rows of tiles of the weight, and in MXFP4 of its scales."""
    scales = mxfp4.scale_rows(weight_scale).tensors if scheme == "mxfp4" else ()
    return Prepared((*fp8.tile_rows(weight).tensors, *scales))


@ops.quantized_mla_paged_attention.kernel(
    "aiter",
    layout="paged",
    tokens=PROMPTS,
    refuses=_refuse_quantized,
    prepare={("weight", "weight_scale"): _tiles},
    attributes=("scheme",),
)
def quantized_mla_paged_attention(
    q: Tensor,
    weight: tuple[Tensor, ...],
    weight_scale: Tensor,
    kv_cache: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    block_tables: Tensor,
    kv_scale: Tensor | None,
    scale: float,
    scheme: str,
    dtype: torch.dtype,
) -> Tensor:
    tiles, heads = weight[0], q.shape[-2]
    shuffled = tiles.view(16 * tiles.shape[0], -1)
    latent = shuffled.shape[-1] * STORED[scheme]
    nope = q.shape[-1] - (kv_cache.shape[-1] - latent)

    def expanded(latents: Tensor, k_rope: Tensor) -> tuple[Tensor, Tensor]:
        k_pe = k_rope.expand(-1, heads, -1)
        if scheme == "mxfp4":
            codes, scales = quant_mxfp4(latents, rounding="even")
            return mxfp4.split_tiles(codes, tiles, scales, weight[1], k_pe, nope, q.dtype)
        codes, scales = quant_fp8_group(latents, group=128, column_major_scales=False, dtype=dtype)
        return fp8.split_tiles(codes, tiles, scales, weight_scale, k_pe, nope, q.dtype)

    def dequantized() -> Tensor:
        plain = plain_weight(shuffled)
        return ops.kv_b_weight.reference(plain, weight_scale, scheme=scheme, dtype=q.dtype)

    step = query_start, seq_lens, block_tables
    return _attended(q, kv_cache, step, kv_scale, nope, scale, expanded, dequantized)
