"""Attention over a latent cache [blocks, block_size, 1, L + R] in Triton: rows of the cache are the
keys of all heads, and their first L columns the values.
"""

from itertools import pairwise

import torch
from torch import Tensor

from stand_ins import stands_for
from stand_ins.attention import attended
from stand_ins.formats import native_fp8
from stand_ins.memory import check

TRITON = "aiter.ops.triton.attention.mla"


def over_pages(
    q: Tensor,
    kv_buffer: Tensor,
    out: Tensor,
    bounds: list[int],
    lengths: list[int],
    block_tables: Tensor,
    scale: float,
    latent: int,
    kv_descale: Tensor | None,
) -> None:
    """Into rows of out; block b of sequence s is block_tables[s, b]."""
    keys = kv_buffer.float() * (1.0 if kv_descale is None else float(kv_descale))
    for s, (a, b) in enumerate(pairwise(bounds)):
        if a == b or not lengths[s]:
            continue
        blocks = block_tables[s, : -(-lengths[s] // keys.shape[1])].long()
        seen = keys[blocks].flatten(0, 1)[: lengths[s]]
        mixed = attended(q[a:b].float(), seen, seen[..., :latent], scale, True, (-1, -1))
        out[a:b] = mixed.to(out.dtype)


def checked_in_triton(
    q: Tensor, kv_buffer: Tensor, latent: int, rotated: int, causal: bool, q_descale: Tensor | None
) -> None:
    assert causal, "Only causal attention is supported"
    assert latent + rotated == q.shape[-1] == kv_buffer.shape[-1]
    if q_descale is not None:
        raise NotImplementedError("arguments that no lowering gives")
    for width in (latent, rotated, kv_buffer.shape[1]):
        check(width >= 16 and width & (width - 1) == 0, "tl.arange takes powers of two")
    check(q.stride(-1) == 1 and q.dtype in (torch.bfloat16, torch.float16), "queries")
    check(kv_buffer.dtype in (q.dtype, native_fp8()), "KV_CACHE_DTYPE")


@stands_for(TRITON)
def mla_prefill_fwd(
    q: Tensor,
    kv_buffer: Tensor,
    out: Tensor,
    cu_seqlens_q: Tensor,
    seqused_k: Tensor,
    max_seqlen_kv: int,
    block_tables: Tensor,
    softmax_scale: float,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    causal: bool,
    q_descale: Tensor | None,
    kv_descale: Tensor | None,
    out_scale: Tensor | None = None,
    shuffled_kv_cache: bool = False,
) -> Tensor:
    """Ragged sequences. Over codes, weights of the softmax become codes, too."""
    checked_in_triton(q, kv_buffer, kv_lora_rank, qk_rope_head_dim, causal, q_descale)
    check(kv_buffer.dtype == q.dtype, "weights of the softmax in fp8")
    bounds, lengths = cu_seqlens_q.tolist(), seqused_k.tolist()
    over_pages(
        q, kv_buffer, out, bounds, lengths, block_tables, softmax_scale, kv_lora_rank, kv_descale
    )
    return out


@stands_for(TRITON)
def mla_decode_fwd(
    q: Tensor,
    kv_buffer: Tensor,
    out: Tensor,
    cu_seqlens_q: Tensor,
    seqused_k: Tensor,
    max_seqlen_kv: int,
    block_tables: Tensor,
    softmax_scale: float,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    causal: bool,
    q_descale: Tensor | None,
    kv_descale: Tensor | None,
    q_scales: Tensor | None = None,
    out_scale: Tensor | None = None,
    shuffled_kv_cache: bool = False,
    skip_reduce: bool = False,
) -> Tensor:
    """As many tokens of each sequence; a row of a sequence without keys is garbage."""
    checked_in_triton(q, kv_buffer, kv_lora_rank, qk_rope_head_dim, causal, q_descale)
    check(q.shape[0] == len(seqused_k), "no lowering gives several tokens a sequence")
    bounds, lengths = cu_seqlens_q.tolist(), seqused_k.tolist()
    check(bounds == list(range(q.shape[0] + 1)), "rows that no sequence has")
    check(max(lengths) <= max_seqlen_kv, "keys beyond the last part")
    out.fill_(torch.nan)
    over_pages(
        q, kv_buffer, out, bounds, lengths, block_tables, softmax_scale, kv_lora_rank, kv_descale
    )
    return out


@stands_for("aiter.ops.triton.attention.mla_decode")
def decode_attention_fwd(
    q: Tensor,
    k_buffer: Tensor,
    v_buffer: Tensor,
    o: Tensor,
    lse: Tensor,
    req_to_token: Tensor,
    b_seq_len: Tensor,
    attn_logits: Tensor,
    num_kv_splits: int,
    sm_scale: float,
    page_size: int = 1,
    logit_cap: float = 0.0,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Row t of q over the first b_seq_len[t] tokens of pages req_to_token[t]; keys and values
    [tokens, 1, width]. A row without keys is garbage.
    """
    assert num_kv_splits == attn_logits.shape[2]
    check(attn_logits.shape == (*q.shape[:2], num_kv_splits, v_buffer.shape[-1] + 1), "attn_logits")
    check(attn_logits.dtype == lse.dtype == torch.float32, "written as float")
    check(lse.shape == q.shape[:2], "lse")
    factors = [1.0 if x is None else float(x) for x in (k_scale, v_scale)]
    for t, length in enumerate(b_seq_len.tolist()):
        check(length > 0, "the result is 0 / 0")
        token = torch.arange(length)
        slots = req_to_token[t, token // page_size].long() * page_size + token % page_size
        k, v = (x[slots].float() * f for x, f in zip((k_buffer, v_buffer), factors, strict=True))
        o[t] = attended(q[t : t + 1].float(), k, v, sm_scale, True, (-1, -1))[0].to(o.dtype)


@stands_for(
    "aiter.ops.triton.attention.unified_attention_sparse_mla",
    "aiter.ops.triton.unified_attention_sparse_mla",
)
def unified_attention_sparse_mla(
    q: Tensor,
    kv: Tensor,
    out: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    seqused_k: Tensor,
    max_seqlen_k: int,
    softmax_scale: float,
    topk_indices: Tensor,
    block_table: Tensor,
    kv_lora_rank: int,
) -> None:
    """Row t over the slots topk_indices[t] of the cache; a negative one is none. Programs have 16
    heads, and columns by powers of two.
    """
    latent, rotated = kv_lora_rank, q.shape[-1] - kv_lora_rank
    checked_in_triton(q, kv, latent, rotated, True, None)
    check(kv.dtype == q.dtype, "both operands of a dot have one dtype")
    heads = q.shape[1] // 16 * 16
    keys = kv.flatten(0, 2)
    for t in range(int(cu_seqlens_q[-1])):
        slots = topk_indices[t][topk_indices[t] >= 0].long()
        if len(slots):
            seen = keys[slots].float().unsqueeze(1)
            row = q[t : t + 1, :heads].float()
            mixed = attended(row, seen, seen[..., :latent], softmax_scale, False, (-1, -1))
            out[t, :heads] = mixed[0].to(out.dtype)
