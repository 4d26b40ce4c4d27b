"""Attention over caches in pages: page p of a sequence is block block_tables[s, p]."""

import torch
from torch import Tensor

from stand_ins import ARCH, stands_for
from stand_ins.attention import attended
from stand_ins.cache import in_memory, of_shuffled

FP8 = {"gfx942": torch.float8_e4m3fnuz, "gfx950": torch.float8_e4m3fn}


def one_or_none(scale: Tensor | None) -> float:
    return 1.0 if scale is None else float(scale)


@stands_for("aiter.ops.triton.attention.unified_attention", "aiter.ops.triton.unified_attention")
def unified_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    seqused_k: Tensor,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
    block_table: Tensor,
    softcap: float,
    q_descale: Tensor | None,
    k_descale: Tensor | None,
    v_descale: Tensor | None,
    q_scales: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    output_scale: Tensor | None = None,
    qq_bias: Tensor | None = None,
    sinks: Tensor | None = None,
    shuffled_kv_cache: bool = False,
    skip_reduce: bool = False,
) -> Tensor:
    """Into out [T, N, D]: causal, rows of sequence s are cu_seqlens_q[s] to [s + 1]; where
    max_seqlen_q is 1 it is row s. Caches are [blocks, block_size, K, D], or shuffled: keys
    [blocks, K, D/x, block_size, x], values [blocks, K, block_size/x, D, x].

    A split over more than 512 keys leaves garbage in rows of no sequence.
    """
    assert causal, "Only causal attention is supported"
    if any(x is not None for x in (q_descale, q_scales, alibi_slopes, output_scale, qq_bias)):
        raise NotImplementedError("arguments that no lowering gives")
    if k.dtype not in (q.dtype, FP8[ARCH.get()]):
        raise RuntimeError(f"a cache in {k.dtype}")
    q = in_memory(q, tuple(q.shape), (q.stride(0), q.stride(1), 1))
    block_size = k.shape[3] if shuffled_kv_cache else k.shape[1]
    for tile in (block_size, q.shape[2] if shuffled_kv_cache else 1):
        if tile & (tile - 1):
            raise RuntimeError("arange's range must be a power of 2")
    if shuffled_kv_cache:
        blocks, heads, _, block_size, _ = k.shape
        k = k.permute(0, 3, 1, 2, 4).reshape(blocks, block_size, heads, -1)
        v = v.permute(0, 2, 4, 1, 3).reshape(blocks, block_size, heads, -1)
    if max_seqlen_k > 512 and not window_size[0] >= 0:
        out.fill_(torch.nan)
    bounds = cu_seqlens_q.tolist()
    keys = k.float() * one_or_none(k_descale)
    values = v.float() * one_or_none(v_descale)
    for s, length in enumerate(seqused_k.tolist()):
        rows = range(s, s + 1) if max_seqlen_q == 1 else range(bounds[s], bounds[s + 1])
        if not len(rows) or not length:
            continue
        pages = block_table[s, : -(-length // k.shape[1])].long()
        k_of, v_of = (x[pages].flatten(0, 1)[:length] for x in (keys, values))
        here = slice(rows.start, rows.stop)
        out[here] = attended(
            q[here].float(),
            k_of,
            v_of,
            softmax_scale,
            True,
            (window_size[0], -1),
            softcap,
            sinks,
        ).to(out.dtype)
    return out


@stands_for("aiter")
def pa_fwd_asm(
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    block_tables_stride0: int,
    max_qlen: int = 1,
    K_QScale: Tensor | None = None,
    V_QScale: Tensor | None = None,
    out_: Tensor | None = None,
    qo_indptr: Tensor | None = None,
    high_precision: int | None = 1,
    kernelName: str | None = None,
) -> Tensor:
    """The last token of each sequence s, row s of Q [S, N, 128], over keys [blocks, K, 128/x,
    block_size, x] and values [blocks, K, block_size/x, 128, x] -> [S, N, 128]. Scores are divided
    by sqrt(128). A row of a sequence without tokens is garbage.
    """
    if max_qlen != 1 or any(x is not None for x in (K_QScale, V_QScale, out_, qo_indptr)):
        raise NotImplementedError("arguments that no lowering gives")
    if Q.shape[2] != 128:
        raise RuntimeError(f"ASM PA only supports head_size=128, got {Q.shape[2]}")
    if Q.dtype not in (torch.float16, torch.bfloat16) or K.dtype != Q.dtype or V.dtype != Q.dtype:
        raise RuntimeError(f"cannot get heuristic kernel for {Q.dtype} and {K.dtype}")
    heads, block_size = K.shape[1], K.shape[3]
    if Q.shape[1] // heads > 16 or block_size != 16:
        raise RuntimeError("cannot get heuristic kernel! gqa, block_size")
    if context_lens.dtype != torch.int32 or block_tables.dtype != torch.int32:
        raise RuntimeError("the kernel reads int32")
    if not Q.is_contiguous():
        raise RuntimeError("the result would lie as the queries do")
    tables = in_memory(block_tables, tuple(block_tables.shape), (block_tables_stride0, 1))
    keys, values = of_shuffled(K, V, heads, 128)
    keys, values = keys.flatten(3), values.flatten(1, 2)
    out = torch.full_like(Q, torch.nan)
    for s, length in enumerate(context_lens.tolist()):
        if length:
            pages = tables[s, : -(-length // block_size)].long()
            of_sequence = (x[pages].flatten(0, 1)[:length] for x in (keys, values))
            out[s] = attended(Q[s : s + 1], *of_sequence, 128**-0.5, True, (-1, -1))[0]
    return out


GLUON = "aiter.ops.triton.gluon.pa_decode_gluon"


@stands_for(GLUON)
def get_recommended_splits(num_sequences: int, num_kv_heads: int, split_kv_blocks: int = 1) -> int:
    return min(-(-304 // (num_sequences * num_kv_heads * split_kv_blocks)) * split_kv_blocks, 8)


@stands_for(GLUON)
def pa_decode_gluon(
    output: Tensor,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    context_lengths: Tensor,
    block_tables: Tensor,
    softmax_scale: float,
    query_length: int,
    max_context_partition_num: int,
    context_partition_size: int = 256,
    compute_type: torch.dtype = torch.bfloat16,
    query_scale: Tensor | None = None,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    exp_sums: Tensor | None = None,
    max_logits: Tensor | None = None,
    temporary_output: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    sliding_window: int = 0,
    ps: bool = True,
) -> None:
    """Into output [S, N, D], of the last token of each sequence, row s of query: over keys [blocks,
    K, D/x, block_size, x] and values [blocks, K, block_size/x, D, x]. The window ends behind the
    last key: it has one key less than sliding_window. Buffers are made where none are given. A row
    of a sequence without tokens is garbage. Codes are known by their scales, of which each is one
    number or one a token and head.
    """
    given = (query_scale, exp_sums, max_logits, temporary_output)
    if query_length != 1 or any(x is not None for x in (*given, alibi_slopes)):
        raise NotImplementedError("arguments that no lowering gives")
    assert query.shape[1] // key_cache.shape[1] <= 64, "equivalent_query_group_size exceeds 64"
    assert key_cache.dim() == 5 and output.dim() == query.dim() == 3
    assert key_cache.shape[3] in (16, 64, 1024), "kv_block_size"
    assert query.dtype == output.dtype == compute_type
    assert key_cache.dtype == value_cache.dtype and key_cache.dtype in (
        query.dtype,
        FP8[ARCH.get()],
    )
    scaled = key_scale is not None and value_scale is not None
    if scaled != (key_cache.dtype != query.dtype):
        raise RuntimeError("codes without scales are read in pieces of 8")
    for scale in (key_scale, value_scale):
        if scale is not None and (scale.dtype != torch.float32 or scale.numel() != 1):
            raise NotImplementedError("a scale a token and head")
    if context_lengths.dtype != torch.int32 or block_tables.dtype != torch.int32:
        raise RuntimeError("the kernel reads int32")
    if not output.is_contiguous() or not query.is_contiguous():
        raise RuntimeError("rows are seen as [S, 1, K, N / K, D], output without a copy")
    if not ps or not 1 <= max_context_partition_num <= 8 or context_partition_size != 256:
        raise NotImplementedError("another way to split the keys")
    _, heads, pieces, block_size, piece = key_cache.shape
    keys, values = of_shuffled(key_cache, value_cache, heads, pieces * piece)
    keys = keys.flatten(3).float() * one_or_none(key_scale)
    values = values.flatten(1, 2).float() * one_or_none(value_scale)
    output.fill_(torch.nan)
    for s, length in enumerate(context_lengths.tolist()):
        if length:
            pages = block_tables[s, : -(-length // block_size)].long()
            of_sequence = (x[pages].flatten(0, 1)[:length] for x in (keys, values))
            left = sliding_window - 2 if sliding_window else -1
            seen = attended(
                query[s : s + 1], *of_sequence, softmax_scale, True, (left, -1), 0.0, sinks
            )
            output[s] = seen[0]
