"""AITER's Triton attention over a paged latent cache, with the projections of keys and values
absorbed: what it refuses, and how it is called. Kernels in `latent_attention_triton` and its
neighbours take it for all that theirs do not serve.

A decode step takes its kernel that splits the keys, other steps that for prompts. Over codes the
latter would round the weights of the softmax to fp8: there each token is a sequence of its own, for
a kernel that multiplies in 16 bits. Everything that the host decides comes from shapes.
"""

import torch
from torch import Tensor

from atomc.kernels.aiter.attention.unified_attention import blank_padding
from atomc.kernels.aiter.library import FP8_OF, Function, unfit
from atomc.kernels.aiter.rows.kv_write import odd_blocks
from atomc.kernels.checks import named, strided, unlike, unsupported
from atomc.kernels.row_views import as_heads
from atomc.ops.formats import HALVES
from atomc.ops.op import Refusal
from atomc.platform import Platform

MLA = "aiter.ops.triton.attention.mla"
mla_decode_fwd = Function("mla_decode_fwd", MLA, takes=["kv_lora_rank", "seqused_k"])
mla_prefill_fwd = Function("mla_prefill_fwd", MLA, takes=["kv_lora_rank", "seqused_k"])
decode_attention_fwd = Function(
    "decode_attention_fwd", "aiter.ops.triton.attention.mla_decode", takes=["page_size", "k_scale"]
)
# The least columns of a product on AMD's matrix cores, and keys of a tile, which is a block.
LEAST = 16
# Parts of the keys of a token that is a sequence of its own. Not measured on an AMD GPU.
PARTS = 8


refuse_chosen = named("chosen", unsupported, "AITER's attention over all keys")


def unattended_latents(
    platform: Platform, q: Tensor, kv_cache: Tensor, kv_scale: Tensor | None, latent: int
) -> Refusal | None:
    """Why `attended_latents` does not serve these."""
    if reason := unfit(platform, mla_decode_fwd, mla_prefill_fwd, decode_attention_fwd) or unlike(
        HALVES, q=q
    ):
        return reason
    codes = FP8_OF[platform.arch]
    if kv_cache.dtype not in (q.dtype, codes):
        return Refusal(
            "dtype",
            f"the cache is {kv_cache.dtype}, the query {q.dtype}: AITER reads one like it, or "
            f"{codes}",
        )
    return unwalkable(q, kv_cache, latent)


def unwalkable(q: Tensor, kv_cache: Tensor, latent: int) -> Refusal | None:
    """What AITER's Triton kernels over latents have in common, and do not take."""
    rotated = kv_cache.shape[-1] - latent
    if any(width < LEAST or width & (width - 1) for width in (latent, rotated)):
        return Refusal(
            "shape",
            f"a latent of {latent} and {rotated} rotated columns: AITER takes powers of two from "
            f"{LEAST} on",
        )
    return odd_blocks(kv_cache) or strided(q=q, kv_cache=kv_cache)


def attended_latents(
    q: Tensor,
    kv_cache: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    block_tables: Tensor,
    kv_scale: Tensor | None,
    latent: int,
    scale: float,
) -> Tensor:
    """mla_absorbed_attention."""
    result = q.new_zeros((*q.shape[:-1], latent))
    q, out = (as_heads(x) for x in (q, result))  # out: a view of the result
    tokens, _, width = q.shape
    sequences = seq_lens.shape[0]
    if not tokens or not sequences:
        return result
    if tokens != sequences and kv_cache.dtype != q.dtype:
        _attend_tokens(q, kv_cache, out, query_start, seq_lens, block_tables, kv_scale, scale)
        return result
    run = mla_decode_fwd if tokens == sequences else mla_prefill_fwd
    starts = query_start
    if tokens == sequences:  # row s is taken for sequence s
        starts = torch.arange(tokens + 1, dtype=torch.int32, device=q.device)
    run(
        q,
        kv_cache.unsqueeze(2),
        out,
        starts,
        seq_lens,
        block_tables.shape[1] * kv_cache.shape[1],
        block_tables,
        scale,
        latent,
        width - latent,
        True,
        None,
        kv_scale,
    )
    if tokens == sequences:
        blank_padding(out, query_start, seq_lens)
    return result


def _attend_tokens(
    q: Tensor,
    kv_cache: Tensor,
    out: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    block_tables: Tensor,
    kv_scale: Tensor | None,
    scale: float,
) -> None:
    """Into out, with each token as a sequence that ends with it."""
    tokens, heads, latent = out.shape
    of, lengths = visible_keys(tokens, query_start, seq_lens)
    keys = kv_cache.flatten(0, 1).unsqueeze(1)
    decode_attention_fwd(
        q,
        keys,
        keys[..., :latent],
        out,
        q.new_empty((tokens, heads), dtype=torch.float32),
        block_tables[of],
        lengths.clamp(min=1),
        q.new_empty((tokens, heads, PARTS, latent + 1), dtype=torch.float32),
        PARTS,
        scale,
        page_size=kv_cache.shape[1],
        k_scale=kv_scale,
        v_scale=kv_scale,
    )
    out.masked_fill_((lengths == 0)[:, None, None], 0.0)


def visible_keys(rows: int, query_start: Tensor, seq_lens: Tensor) -> tuple[Tensor, Tensor]:
    """The sequence of each row, and how many keys it sees [rows] i32; 0 for padding."""
    row = torch.arange(rows, device=query_start.device)
    of = torch.searchsorted(query_start[1:], row, right=True).clamp_(max=len(seq_lens) - 1)
    seen = (seq_lens - query_start[1:])[of] + row + 1
    return of, torch.where(row < query_start[-1], seen, 0).to(torch.int32)
