"""Attention over chosen rows of a paged latent cache by AITER's Triton kernel (DeepSeek-V3.2), with
the projections of keys and values absorbed.

It takes heads by 16: rows of zeros are added, and their results dropped.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from atomc import ops
from atomc.kernels.aiter.library import Function, unfit
from atomc.kernels.aiter.rows.kv_write import odd_blocks
from atomc.kernels.checks import strided, unlike
from atomc.ops.formats import HALVES
from atomc.ops.op import Refusal
from atomc.platform import Platform

unified_attention_sparse_mla = Function(
    "unified_attention_sparse_mla",
    "aiter.ops.triton.attention.unified_attention_sparse_mla",
    "aiter.ops.triton.unified_attention_sparse_mla",
)
HEADS = LEAST = 16


def _refuse(
    platform: Platform, q: Tensor, kv_cache: Tensor, latent: int, chosen: Tensor | None, **_: object
) -> Refusal | None:
    if chosen is None:
        return Refusal("argument", "AITER's kernel for chosen keys, and none are chosen")
    if reason := unfit(platform, unified_attention_sparse_mla) or unlike(
        HALVES, q=q, kv_cache=kv_cache
    ):
        return reason
    rotated = kv_cache.shape[-1] - latent
    if any(width < LEAST or width & (width - 1) for width in (latent, rotated)):
        return Refusal(
            "shape",
            f"a latent of {latent} and {rotated} rotated columns: AITER takes powers of two from "
            f"{LEAST} on",
        )
    return odd_blocks(kv_cache) or strided(q=q, kv_cache=kv_cache)


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
    assert chosen is not None
    rows, by_row = q.reshape(-1, *q.shape[-2:]), chosen.flatten(0, -2)
    tokens, heads, _ = rows.shape
    out = q.new_zeros((tokens, heads + -heads % HEADS, latent))
    if tokens and seq_lens.shape[0]:
        unified_attention_sparse_mla(
            F.pad(rows, (0, 0, 0, -heads % HEADS)),
            kv_cache.unsqueeze(2),
            out,
            query_start,
            tokens,
            seq_lens,
            block_tables.shape[1] * kv_cache.shape[1],
            scale,
            _slots(by_row, query_start, block_tables, kv_cache.shape[1]),
            block_tables,
            latent,
        )
    return out[:, :heads].contiguous().view(*q.shape[:-1], latent)


def _slots(chosen: Tensor, query_start: Tensor, block_tables: Tensor, block_size: int) -> Tensor:
    """The slots of chosen positions [T, K]; -1: none."""
    row = torch.arange(chosen.shape[0], device=chosen.device)
    of = torch.searchsorted(query_start[1:], row, right=True).clamp_(max=len(block_tables) - 1)
    position = chosen.clamp(min=0)
    blocks = block_tables[of].gather(1, (position // block_size).long())
    slots = blocks * block_size + position % block_size
    return torch.where(chosen < 0, -1, slots).to(torch.int32)
