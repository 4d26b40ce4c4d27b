"""The indexer of sparse attention: the write of its keys, the scores of cached ones, and the choice
of the best.

A page holds the codes of its tokens, then their scales: [pages, page_size, C + 4] bytes, of which
the first page_size * C are codes.
"""

import torch
from torch import Tensor

from stand_ins import stands_for
from stand_ins.formats import largest, native_fp8, to_codes
from stand_ins.memory import check, contiguous_view

THREADS, VECTOR = 8, 16
SCALE_BYTES = 4


def page_parts(kv_cache: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The codes [pages, page_size, C] and scales [pages, page_size] of the bytes of a cache."""
    pages, page_size = kv_cache.shape[:2]
    flat = kv_cache.view(torch.uint8).view(pages, -1)
    codes, scales = flat[:, : page_size * width], flat[:, page_size * width :]
    return (
        codes.view(native_fp8()).unflatten(1, (page_size, width)),
        scales.view(torch.float32).unflatten(1, (page_size,)),
    )


@stands_for("aiter")
def indexer_k_quant_and_cache(
    k: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    quant_block_size: int,
    scale_fmt: str,
    preshuffle: bool = False,
) -> None:
    """k [T, C], read without strides, into slots of kv_cache [pages, page_size, C + 4]: codes with
    one scale a token, amax / largest, where amax is at least 1e-4.
    """
    tokens, width = k.shape
    check(width % quant_block_size == 0, "head_dim must be divisible by quant_block_size")
    check(slot_mapping.dtype == torch.int64, "slot_mapping is read as int64")
    check(k.dtype in (torch.float32, torch.bfloat16, torch.float16), f"no kernel for {k.dtype}")
    check(kv_cache.element_size() == 1, "the cache is bytes")
    if preshuffle or scale_fmt == "ue8m0" or width != quant_block_size:
        raise NotImplementedError("arguments that no lowering gives")
    check(quant_block_size == THREADS * VECTOR, "threads that leave take part in the reduction")
    rows = contiguous_view(k, tokens, width)
    codes, scales = page_parts(kv_cache, width)
    for t, slot in enumerate(contiguous_view(slot_mapping, tokens).tolist()):
        if slot < 0:
            continue
        at = divmod(slot, kv_cache.shape[1])
        scale = rows[t].float().abs().max().clamp(min=1e-4) / largest(codes.dtype)
        scales[at] = scale
        codes[at] = to_codes(rows[t], 1.0 / scale, codes.dtype)


@stands_for("aiter.ops.triton.attention.pa_mqa_logits")
def deepgemm_fp8_paged_mqa_logits(
    q_fp8: Tensor,
    kv_cache: Tensor,
    weights: Tensor,
    out_logits: Tensor,
    context_lens: Tensor,
    kv_indices: Tensor,
    max_model_len: int,
    Preshuffle: bool = False,
    KVBlockSize: int = 1,
    ChunkK: int = 256,
    TotalCuCount: int | None = None,
    WavePerEU: int = 2,
    VarCtxSchedule: Tensor | None = None,
) -> None:
    """q_fp8 [B, next_n, H, C] and weights [B * next_n, H] over kv_cache [pages, page_size, 1, C + 4]
    into out_logits [B * next_n, >= max_model_len]: sum_h weight relu(q . k) with the scales of k.

    Token n of sequence b sees context_lens[b] - next_n + n + 1 keys; columns up to context_lens[b]
    are written, -inf behind what a token sees, no others. Tables are read as if contiguous.
    """
    if Preshuffle or VarCtxSchedule is not None:
        raise NotImplementedError("arguments that no lowering gives")
    _, next_n, heads, width = q_fp8.shape
    check(kv_cache.shape[1] == KVBlockSize, "assert block_Size == KVBlockSize")
    check(q_fp8.dtype == native_fp8(), "the pointer of q is of the fp8 of the architecture")
    check(q_fp8.stride(-1) == 1 and weights.stride(-1) == 1, "columns follow each other")
    check(weights.dtype == out_logits.dtype == torch.float32, "weights and logits are fp32")
    for x in (context_lens, kv_indices):
        check(x.dtype == torch.int32, "read as int32")
    check(heads in (32, 64, 128) and width == 128, "its tiles")
    check(not any(s % 16 for s in (*q_fp8.stride()[:3], weights.stride(0))), "tt.divisibility")
    tables = contiguous_view(kv_indices, *kv_indices.shape)
    codes, scales = page_parts(kv_cache.flatten(1, 2), width)
    for b, length in enumerate(context_lens.tolist()):
        key = torch.arange(min(length, max_model_len))
        page = tables[b, key // KVBlockSize].long()
        seen = codes[page, key % KVBlockSize].float()
        factor = scales[page, key % KVBlockSize]
        for n in range(next_n):
            row = b * next_n + n
            products = (q_fp8[b, n].float() @ seen.T * factor).relu()
            scores = (products * weights[row, :, None]).sum(0)
            scores[key > length - next_n + n] = -torch.inf
            out_logits[row, : len(key)] = scores


@stands_for("aiter")
def top_k_per_row_decode(
    logits: Tensor,
    next_n: int,
    seqLens: Tensor,
    indices: Tensor,
    numRows: int,
    stride0: int,
    stride1: int,
    k: int = 2048,
    stable: bool = False,
) -> None:
    """Into indices [numRows, k] the columns of the k largest of the first n of each row, where
    n = seqLens[row // next_n] - next_n + row % next_n + 1. With `stable` in ascending order, and of
    equal ones the first; else in any. Rows of the logits are stride0 apart, their columns adjacent;
    places behind the n-th hold what they did.
    """
    check(logits.dtype == torch.float32, "logits are read as float")
    check(seqLens.dtype == indices.dtype == torch.int32, "read as int")
    check(indices.is_contiguous() and indices.shape[1] == k, "written as if contiguous")
    rows = logits.as_strided((numRows, logits.shape[1]), (stride0, 1))
    for row in range(numRows):
        n = int(seqLens[row // next_n]) - next_n + row % next_n + 1
        check(0 < n <= logits.shape[1], "a row without columns")
        order = rows[row, :n].argsort(descending=True, stable=True)[:k]
        chosen = order.sort().values if stable else order.flip(0)
        indices[row, : len(chosen)] = chosen.to(torch.int32)
