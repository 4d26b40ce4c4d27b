"""Attention by scaled_dot_product_attention, without state or over a paged cache, any device."""

from typing import Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from atomc import ops
from atomc.kernels.checks import first_refusal, named, unsupported
from atomc.kernels.row_views import as_heads, with_lead
from atomc.kernels.torch.sequence import attend, gathered
from atomc.ops.attention import PagedSequences, loaded_values
from atomc.ops.op import Refusal
from atomc.platform import Platform


def _other_mask(platform: Platform, q: Tensor, mask: Tensor | None) -> Refusal | None:
    # Rounding a wider mask would change which of its values dominate all scores.
    mask_dtypes = (torch.bool, q.dtype, torch.float32) if platform.is_cpu else (torch.bool, q.dtype)
    if mask is not None and mask.dtype not in mask_dtypes:
        return Refusal(
            "dtype",
            f"scaled_dot_product_attention takes no {mask.dtype} mask with a {q.dtype} query here",
        )
    return None


@ops.attention.kernel(
    "torch",
    refuses=first_refusal(
        named("softcap sinks", unsupported, "scaled_dot_product_attention"), _other_mask
    ),
)
def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, causal: bool, window: int
) -> Tensor:
    if q.dim() == 3:
        mask = mask if mask is None or mask.dim() == 2 else mask[None]
        out: Tensor = attention(
            q[None], k[None], v[None], None, mask, scale=scale, causal=causal, window=window
        )
        return out[0]
    mask = _fusable(_seen(q, k, mask, causal, window))
    heads, keys, values = q.transpose(-2, -3), k.transpose(-2, -3), v.transpose(-2, -3)
    causal = causal and mask is None
    if q.is_cpu and q.dtype != torch.float32 and q.shape[-3] == 1 and not causal:
        out = _one_token(heads, keys, values, mask, scale)
    else:
        out = F.scaled_dot_product_attention(
            heads, keys, values, mask, is_causal=causal, scale=scale, enable_gqa=True
        )
    if mask is not None and q.is_cuda and torch.version.hip:
        # Nothing says that a row that sees no key is finite on AMD GPUs, as it is on others.
        blind = ~mask.any(-1) if mask.dtype == torch.bool else (mask == float("-inf")).all(-1)
        out.masked_fill_(blind[..., None], 0.0)  # in place keeps the layout of contiguous tokens
    return out.transpose(-2, -3).contiguous()


def _seen(q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, window: int) -> Tensor | None:
    """The mask combined with `window` and `causal`; unchanged where scaled_dot_product_attention
    applies `causal`.
    """
    if not window and not (causal and mask is not None):
        return mask
    rows = torch.arange(q.shape[-3], device=q.device)[:, None]
    columns = torch.arange(k.shape[-3], device=q.device)[None, :]
    seen = columns <= rows if causal else torch.ones_like(columns <= rows)
    if window:
        seen &= columns > rows - window
    if mask is None:
        return seen
    return mask & seen if mask.dtype == torch.bool else mask.masked_fill(~seen, float("-inf"))


def _fusable(mask: Tensor | None) -> Tensor | None:
    """The mask as torch's fused kernels take it: with two or four dimensions, and on CUDA with
    contiguous rows.
    """
    if mask is None:
        return None
    mask = mask[None] if mask.dim() == 3 else mask
    return mask.contiguous() if mask.is_cuda and mask.stride(-1) != 1 else mask


def _one_token(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """q [..., N, 1, D] over k and v [..., K, S, D], with the heads of a group as rows of one matrix
    product.

    Zen 4, bf16, 16 query heads and 8 key/value heads of 64, 512 keys: 0.21 ms, 0.92 with
    enable_gqa; fp32 0.19 and 0.17.
    """
    folded = q.reshape(*k.shape[:-2], -1, q.shape[-1])
    group = folded.shape[-2]
    if mask is not None and mask.dim() > 2 and mask.shape[-3] > 1:  # a mask for each head
        mask = mask.reshape(*mask.shape[:-3], -1, group, mask.shape[-1])
    if group == 1:
        folded = folded.expand(*folded.shape[:-2], 2, -1)  # one row is slow, two are not
    out = F.scaled_dot_product_attention(folded, k, v, mask, scale=scale)[..., :group, :]
    return out.reshape(*q.shape[:-1], v.shape[-1])


@ops.paged_attention.kernel("torch", layout="paged", syncs=True)
def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    sinks: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    scale: float,
    window: int,
    softcap: float,
    **sequences: Unpack[PagedSequences],
) -> Tensor:
    rows = as_heads(q)
    out = q.new_zeros((*rows.shape[:-1], v_cache.shape[-1]))
    # In 16 bits, values times a scale would be rounded.
    wide = q.dtype if k_scale is None and v_scale is None else torch.float32
    for new, _, keys, values in gathered(k_cache, v_cache, window, **sequences):
        keys, values = loaded_values(keys, k_scale, wide), loaded_values(values, v_scale, wide)
        out[new] = attend(rows[new].to(wide), keys, values, sinks, scale, window, softcap)
    return with_lead(out, q)
