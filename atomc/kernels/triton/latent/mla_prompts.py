"""Latent attention of steps with prompts in Triton: keys and values are computed for the tokens of
the step, and attention over what was cached before it is absorbed.

Both parts and their sum have shapes that do not depend on lengths, so the host waits for nothing.
Programs of the second part leave out sequences of which nothing was cached.
Per pair of a query and a key, the first takes P + R + V multiplications, the second 2 L + R; to
compute keys and values of cached tokens again, and where to keep them, is saved. The tokens of the
step are read back from the cache: the result is that of the cached values, as in later steps.

Attention over chosen keys is absorbed for all tokens, unless no sequence can be longer than the
number of them.
"""

from typing import Unpack

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from atomc import ops
from atomc.kernels.checks import gapped, too_wide, unlike
from atomc.kernels.row_views import as_heads, as_rows, with_lead
from atomc.kernels.triton.attention import attention as dense
from atomc.kernels.triton.attention.attention import MAX_WIDTH
from atomc.kernels.triton.attention.attention_tiles import fitted_tiling, tiling
from atomc.kernels.triton.attention.sequences import tokens_of
from atomc.kernels.triton.latent import mla_attention as absorbed
from atomc.kernels.triton.latent.mla_chosen import attend_chosen, refuse_chosen
from atomc.kernels.triton.latent.mla_prefix import attend_prefixes
from atomc.kernels.triton.launch.launch import begin, overlap, unfit
from atomc.kernels.triton.launch.tiles import LATENT_ATTENTION
from atomc.kernels.triton.linear.batched_head_linear import add_values, queries_to_latents
from atomc.kernels.triton.rows.kv_write import byte_view, code_numbers, codes_of, scale_of_numbers
from atomc.ops.attention import PagedSequences
from atomc.ops.mla_attention import LatentOperands
from atomc.ops.op import Refusal
from atomc.platform import Platform

# Steps of fewer tokens are absorbed as a whole: most of them only decode. Not measured.
PROMPTS = ops.Tokens(257)
TOKENS = constexpr(4)  # of a program that reads rows of the cache


@triton.jit(do_not_specialize=["num_rows", "num_sequences", "table_row"])
def _read_rows(
    cache_ptr,
    out_ptr,
    query_start,
    seq_lens,
    block_tables,
    kv_scale,
    num_rows,
    num_sequences,
    table_row,
    c_block,
    c_slot,
    WIDTH: constexpr,
    BLOCK_SIZE: constexpr,
    CODES: constexpr,
    PDL: constexpr,
):
    """The rows of the cache of TOKENS new tokens of a sequence; zeros for rows of no sequence."""
    begin(PDL)
    s, start, end, length, first, _ = tokens_of(
        tl.program_id(0), query_start, seq_lens, num_rows, num_sequences, TOKENS
    )
    token = first + tl.arange(0, TOKENS)
    own = token < end - start
    cached = own & (s < num_sequences)
    key = length - (end - start) + token
    table = block_tables + tl.cast(s, tl.int64) * table_row
    block = tl.load(table + key // BLOCK_SIZE, mask=cached, other=0).to(tl.int64)
    column = tl.arange(0, triton.next_power_of_2(WIDTH))[None, :]
    at = cache_ptr + (block * c_block + key % BLOCK_SIZE * c_slot)[:, None] + column
    row = tl.load(at, mask=cached[:, None] & (column < WIDTH), other=0)
    number = code_numbers(row, tl.float32, CODES).to(tl.float32) * scale_of_numbers(kv_scale, CODES)
    to = out_ptr + (start + token).to(tl.int64)[:, None] * WIDTH + column
    tl.store(to, number.to(out_ptr.dtype.element_ty), own[:, None] & (column < WIDTH))


def _unexpanded(platform: Platform) -> Refusal | None:
    if platform.is_rocm:
        return Refusal("hardware", "AMD GPUs read chosen keys with the projections absorbed")
    return None


def refuse_mla_paged_attention(
    platform: Platform,
    q: Tensor,
    weight: Tensor,
    kv_cache: Tensor,
    kv_scale: Tensor | None,
    scale: float,
    chosen: Tensor | None,
    **sequences: Unpack[PagedSequences],
) -> Refusal | None:
    latent = weight.shape[-1]
    in_latent_space = q.new_empty((*q.shape[:-1], kv_cache.shape[-1]))
    return (
        unfit(platform, q=q, weight=weight)
        or (None if chosen is None else _unexpanded(platform) or refuse_chosen(chosen))
        or absorbed.refuse_mla_absorbed_attention(
            platform, in_latent_space, kv_cache, kv_scale, latent, scale, **sequences
        )
        or unlike((q.dtype,), weight=weight)
        or too_wide(max(q.shape[-1], weight.shape[0] // q.shape[-2]), MAX_WIDTH, "heads")
        or gapped(**{"the weight": weight})
    )


@ops.mla_paged_attention.kernel(
    "triton",
    layout="paged",
    tokens=PROMPTS,
    refuses=refuse_mla_paged_attention,
    tuned_for=LATENT_ATTENTION.archs,
)
def mla_paged_attention(
    q: Tensor,
    weight: Tensor,
    kv_cache: Tensor,
    kv_scale: Tensor | None,
    scale: float,
    chosen: Tensor | None,
    **sequences: Unpack[PagedSequences],
) -> Tensor:
    rows = as_heads(q)
    tokens, heads, width = rows.shape
    latent = weight.shape[-1]
    of_head = weight.view(heads, weight.shape[0] // heads, latent)
    nope = width - (kv_cache.shape[-1] - latent)
    out = q.new_empty((tokens, heads, of_head.shape[1] - nope))
    longest = sequences["block_tables"].shape[1] * kv_cache.shape[1]
    operands = LatentOperands(
        kv_cache=kv_cache, kv_scale=kv_scale, latent=latent, scale=scale, **sequences
    )
    if tokens and chosen is not None and longest > chosen.shape[-1]:
        projected, by_row = _projected(rows, of_head, kv_cache, nope), as_rows(chosen)
        cut = absorbed.tiling(projected, tokens, by_row.shape[1], kv_cache)
        attended = attend_chosen(projected, cut, by_row, **operands)
        out = ops.linear_by_head.reference(attended, of_head[:, nope:])
    elif tokens:
        query_start, seq_lens = sequences["query_start"], sequences["seq_lens"]
        cached = _rows_of_step(rows, kv_cache, kv_scale, **sequences)
        out, new_lse = _attend_new(rows, of_head, cached, query_start, nope, scale)
        projected = queries_to_latents(rows, of_head, query_start, seq_lens, width - nope)
        cut = absorbed.tiling(projected, len(seq_lens), longest, kv_cache)
        latents, old_lse = attend_prefixes(projected, cut, **operands)
        add_values(out, new_lse, latents, old_lse, of_head[:, nope:])
    return with_lead(out, q)


def _projected(q: Tensor, of_head: Tensor, kv_cache: Tensor, nope: int) -> Tensor:
    """The queries [T, H, P + R] in the latent space: [T, H, L + R]."""
    latent = of_head.shape[-1]
    projected = q.new_empty((*q.shape[:2], kv_cache.shape[-1]))
    torch.bmm(
        q[..., :nope].transpose(0, 1),
        of_head[:, :nope],
        out=projected[..., :latent].transpose(0, 1),
    )
    projected[..., latent:] = q[..., nope:]
    return projected


def _rows_of_step(
    q: Tensor,
    kv_cache: Tensor,
    kv_scale: Tensor | None,
    query_start: Tensor,
    seq_lens: Tensor,
    block_tables: Tensor,
) -> Tensor:
    """The cached rows of the tokens of the step [T, L + R], in the dtype of q [T, H, P + R]."""
    tokens = q.shape[0]
    cached = q.new_empty((tokens, kv_cache.shape[-1]))
    _read_rows[(tokens // TOKENS.value + seq_lens.shape[0] + 1,)](
        byte_view(kv_cache),
        cached,
        query_start,
        seq_lens,
        block_tables,
        kv_scale,
        tokens,
        seq_lens.shape[0],
        block_tables.stride(0),
        *kv_cache.stride()[:2],
        WIDTH=cached.shape[-1],
        BLOCK_SIZE=kv_cache.shape[1],
        CODES=codes_of(kv_cache)["CODES"],
        **overlap(q.device),
    )
    return cached


def _attend_new(
    q: Tensor, of_head: Tensor, cached: Tensor, query_start: Tensor, nope: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention of q [T, H, P + R] over the tokens of the step: [T, H, V], and [T, H] its lse in
    fp32.
    """
    tokens, heads, width = q.shape
    _, outputs, latent = of_head.shape
    both = F.linear(cached[:, :latent], of_head.flatten(0, 1)).view(tokens, heads, outputs)
    k, v = both[..., :nope], both[..., nope:]
    k_rope = cached[:, None, latent:].expand(tokens, heads, -1)
    apart = nope == triton.next_power_of_2(nope)
    if not apart:  # padded by themselves, they would have more columns in all
        k = torch.cat((k, k_rope), -1)
    lse = q.new_empty((tokens, heads), dtype=torch.float32)
    cut = tiling(
        tokens, len(query_start) - 1, 1, heads, width, q.element_size(), tokens, q.device
    )._replace(splits=1)
    out = dense.attend_packed(
        q,
        k,
        v,
        query_start,
        scale,
        fitted_tiling(cut, width, q.device),
        causal=True,
        k_rest=k_rope if apart else None,
        lse=lse,
    )
    return out, lse
