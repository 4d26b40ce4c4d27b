"""Attention over a latent cache [pages, page_size, 1, L + R], whose rows are the keys of all heads,
and the first L columns their values, in assembly.

The pages of sequence s are kv_indices[kv_indptr[s] : kv_indptr[s + 1]]; the assembly kernels have
the widths 512 and 64 and are tested with pages of one token. A persistent kernel does the works that
the metadata lists: rows q_start to q_end of the queries, over pages kv_start to kv_end, written to
the output, or to a place among partial results, which a second kernel joins. Heads that it does
not have are folded: rows of 16 heads take the places of tokens.
"""

from itertools import pairwise

import torch
from torch import Tensor

from stand_ins import ARCH, stands_for
from stand_ins.attention import attended
from stand_ins.formats import native_fp8
from stand_ins.memory import check, row_view

LATENT, WIDTH = 512, 576
UNITS = 3  # compute units
NOTHING = -(2**31) + 7  # in memory that is not written


def folds(heads: int, q_dtype: torch.dtype, kv_dtype: torch.dtype) -> int:
    """Rows that a token becomes."""
    check(heads % 16 == 0 and heads <= 128, f"nhead={heads} not supported")
    if heads == 16:
        return 1
    both = (q_dtype, kv_dtype) == (torch.bfloat16, torch.bfloat16)
    return 1 if both and ARCH.get() == "gfx950" else heads // 16


@stands_for("aiter")
def get_mla_metadata_info_v1(
    batch_size: int,
    max_seqlen_qo: int,
    num_head_qo: int,
    q_dtype: torch.dtype,
    kv_dtype: torch.dtype,
    is_sparse: bool,
    fast_mode: bool = True,
    num_kv_splits: int = 32,
    intra_batch_mode: bool = False,
    max_split_per_batch: int = -1,
) -> tuple[tuple[int | tuple[int, int], torch.dtype], ...]:
    """(shape, dtype) of pointers, work_indptr, work_info_set, reduce_indptr, reduce_final_map and
    reduce_partial_map.
    """
    assert num_head_qo % 8 == 0
    if max_seqlen_qo != 1 or is_sparse or not fast_mode or intra_batch_mode:
        raise NotImplementedError("arguments that no lowering gives")
    tiles = batch_size * folds(num_head_qo, q_dtype, kv_dtype)
    works = 2 * tiles + UNITS
    return (
        (2, torch.uint64),
        (UNITS + 1, torch.int32),
        ((works, 8), torch.int32),
        (tiles + 1, torch.int32),
        ((tiles, 2), torch.int32),
        (works, torch.int32),
    )


@stands_for("aiter")
def get_mla_metadata_v1(
    seqlens_qo_indptr: Tensor,
    seqlens_kv_indptr: Tensor,
    kv_last_page_lens: Tensor,
    num_heads_per_head_k: int,
    num_heads_k: int,
    is_causal: bool,
    work_metadata_ptrs: Tensor,
    work_info_set: Tensor,
    work_indptr: Tensor,
    reduce_indptr: Tensor,
    reduce_final_map: Tensor,
    reduce_partial_map: Tensor,
    page_size: int = 1,
    kv_granularity: int = 16,
    max_seqlen_qo: int = -1,
    uni_seqlen_qo: int = -1,
    fast_mode: bool = True,
    topk: int = -1,
    max_split_per_batch: int = -1,
    intra_batch_mode: bool = False,
    is_cp_round_robin: bool = False,
    mla_version: int = 0,
    dtype_q_nope: torch.dtype | None = None,
    dtype_q_rope: torch.dtype | None = None,
    dtype_kv_nope: torch.dtype | None = None,
    dtype_kv_rope: torch.dtype | None = None,
    dtype_q: torch.dtype | None = None,
    dtype_kv: torch.dtype | None = None,
) -> None:
    """Divides the work, one token a sequence: a sequence of more than kv_granularity keys into two
    parts, if so many are allowed. Dtypes that are not given are bfloat16.
    """
    if num_heads_k != 1 or not is_causal or page_size != 1 or topk >= 0 or not fast_mode:
        raise NotImplementedError("arguments that no lowering gives")
    if (max_seqlen_qo, uni_seqlen_qo) != (1, 1) or intra_batch_mode or is_cp_round_robin:
        raise NotImplementedError("arguments that no lowering gives")
    check(kv_granularity & (kv_granularity - 1) == 0, "kv_granularity Must be power of 2!")
    check(kv_granularity >= 16, "works of fewer than 16 keys are not tested")
    for given in (seqlens_qo_indptr, seqlens_kv_indptr, kv_last_page_lens):
        check(given.dtype == torch.int32, "element type should be int!")
        check(given.stride(0) == 1, "should be continuous!")
    written = (work_info_set, work_indptr, reduce_indptr, reduce_final_map, reduce_partial_map)
    for out, rank in zip(written, (2, 1, 1, 2, 1), strict=True):
        check(out.dtype == torch.int32 and out.dim() == rank, "written as int32 of other sizes")
        out.fill_(NOTHING)
    check(work_metadata_ptrs.dtype == torch.uint64, "pointers")
    check(work_indptr.numel() == UNITS + 1, "it would write behind work_indptr")
    dtypes = (dtype_q_nope or dtype_q, dtype_kv_nope or dtype_kv)
    fold = folds(num_heads_per_head_k, *(dtype or torch.bfloat16 for dtype in dtypes))
    pages = seqlens_kv_indptr.tolist()
    works, partials, joined = 0, 0, 0
    reduce_indptr[0] = 0
    for row in range((len(pages) - 1) * fold):
        sequence = row // fold
        start, end = pages[sequence : sequence + 2]
        check(end > start, "a sequence without keys")
        parts = [(start, end)]
        if end - start > kv_granularity and max_split_per_batch != 1:
            parts = [(start, start + kv_granularity), (start + kv_granularity, end)]
        for first, last in parts:
            place = partials if len(parts) > 1 else -1
            work_info_set[works] = torch.tensor(
                [sequence, place, row, row + 1, first, last, end - last, 0]
            )
            if len(parts) > 1:
                reduce_partial_map[joined] = place
                partials, joined = partials + 1, joined + 1
            works += 1
        reduce_indptr[row + 1] = joined
        reduce_final_map[row] = torch.tensor([row, row + 1])
    for unit in range(UNITS + 1):
        work_indptr[unit] = works * unit // UNITS
    pointers = (work_indptr.data_ptr(), work_info_set.data_ptr())
    work_metadata_ptrs.copy_(torch.tensor(pointers, dtype=torch.uint64))


def softmaxed(q: Tensor, keys: Tensor, scale: float, kv_scale: float) -> tuple[Tensor, Tensor]:
    """q [H, 576] over keys [S, 576]: values [H, 512] and the log of the sum, in fp64."""
    wide = keys.double() * kv_scale
    scores = scale * (q.double() @ wide.T)
    return scores.softmax(-1) @ wide[:, :LATENT], scores.logsumexp(-1)


@stands_for("aiter.mla")
def mla_decode_fwd(
    q: Tensor,
    kv_buffer: Tensor,
    o: Tensor,
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    kv_last_page_lens: Tensor,
    max_seqlen_q: int,
    page_size: int = 1,
    nhead_kv: int = 1,
    sm_scale: float | None = None,
    logit_cap: float = 0.0,
    num_kv_splits: int | None = None,
    num_kv_splits_indptr: Tensor | None = None,
    work_meta_data: Tensor | None = None,
    work_indptr: Tensor | None = None,
    work_info_set: Tensor | None = None,
    reduce_indptr: Tensor | None = None,
    reduce_final_map: Tensor | None = None,
    reduce_partial_map: Tensor | None = None,
    q_scale: Tensor | None = None,
    kv_scale: Tensor | None = None,
    intra_batch_mode: bool = False,
    return_logits: bool = False,
    return_lse: bool = False,
    g_kv_indptr: Tensor | None = None,
    cp_world_size: int = 1,
    cp_rank: int = 0,
    causal: bool = True,
) -> tuple[None, None]:
    """One token of each sequence, q [S, H, 576] -> o [S, H, 512], by its persistent kernel. The
    scale of the scores is 1 / sqrt(576) if none is given.
    """
    assert logit_cap <= 0
    if work_meta_data is None or num_kv_splits is None or max_seqlen_q != 1:
        raise NotImplementedError("what AITER would choose by itself")
    if return_lse or g_kv_indptr is not None or q_scale is not None or not causal:
        raise NotImplementedError("arguments that no lowering gives")
    metadata = (work_indptr, work_info_set, reduce_indptr, reduce_final_map, reduce_partial_map)
    assert all(x is not None for x in metadata), "None has no size"
    check(q.is_contiguous() and o.is_contiguous(), ":only support Q.is_contiguous() for now")
    check(nhead_kv == 1, ":only support num_kv_heads==1 for now")
    check(kv_buffer.shape[1:] == (page_size, 1, WIDTH), "head_size == KV.size(3)")
    if page_size != 1:
        raise NotImplementedError("pages of several tokens")
    check(q.dtype == torch.bfloat16 and o.dtype == torch.bfloat16, "unsupport Q dtype")
    check(kv_buffer.dtype in (torch.bfloat16, native_fp8()), "unsupport KV dtype")
    coded = kv_buffer.dtype != torch.bfloat16
    check(not coded or (kv_scale is not None and kv_scale.dtype == torch.float32), "kv_scale")
    tokens, heads, _ = q.shape
    for x in (qo_indptr, kv_indptr, kv_indices, kv_last_page_lens):
        check(x.dtype == torch.int32 and x.is_contiguous(), "read as int32")
    check(qo_indptr.shape == kv_indptr.shape, "sequences")
    check((kv_last_page_lens == 1).all().item(), "a page of one token has one")
    check(
        work_meta_data.tolist() == [work_indptr.data_ptr(), work_info_set.data_ptr()],
        "the pointers lead to other memory",
    )
    fold = folds(heads, q.dtype, kv_buffer.dtype)
    check(reduce_final_map.shape == (tokens * fold, 2), "metadata of other heads or dtypes")
    rows, out = q.view(tokens * fold, heads // fold, WIDTH), o.view(tokens * fold, -1, LATENT)
    keys = row_view(kv_buffer)
    scale = WIDTH**-0.5 if sm_scale is None else sm_scale
    factor = float(kv_scale) if coded else 1.0
    partial: dict[int, tuple[Tensor, Tensor]] = {}
    starts = qo_indptr.tolist()
    for first, last in pairwise(work_indptr.tolist()):
        for work in work_info_set[first:last].tolist():
            sequence, place, row, _, start, end, *_ = work
            check(starts[sequence] == row // fold, "a row of another sequence")
            check(kv_indptr[sequence] <= start < end <= kv_indptr[sequence + 1], "other pages")
            values, log = softmaxed(rows[row], keys[kv_indices[start:end].long()], scale, factor)
            if place < 0:
                out[row] = values.to(out.dtype)
            else:
                partial[place] = values, log
    for row, (first, last) in enumerate(pairwise(reduce_indptr.tolist())):
        if first == last:
            continue
        parts = [partial[place] for place in reduce_partial_map[first:last].tolist()]
        weights = torch.stack([log for _, log in parts]).softmax(0)
        joined = sum(weights[i][:, None] * values for i, (values, _) in enumerate(parts))
        out[int(reduce_final_map[row, 0])] = joined.to(out.dtype)
    return None, None


@stands_for("aiter.mla")
def mla_prefill_fwd(
    q: Tensor,
    kv_buffer: Tensor,
    o: Tensor,
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    kv_last_page_lens: Tensor,
    max_seqlen_q: int,
    sm_scale: float | None = None,
    logit_cap: float = 0.0,
    num_kv_splits: int | None = None,
) -> Tensor:
    """Ragged sequences of q [T, H, 576] -> o [T, H, 512]; a row sees the keys up to its own, the
    last rows being those of the last keys. Rows of none are not written.
    """
    assert logit_cap <= 0
    check(q.is_contiguous(), ":only support Q.is_contiguous() for now")
    check(q.shape[1] in (16, 128), "only support num_q_heads/num_kv_heads==16 or 128")
    check(kv_buffer.shape[2:] == (1, WIDTH) and q.shape[2] == WIDTH, "head_size == KV.size(3)")
    check(q.dtype == kv_buffer.dtype == o.dtype == torch.bfloat16, "unsupport dtype")
    if kv_buffer.shape[1] != 1:
        raise NotImplementedError("pages of several tokens")
    for x in (qo_indptr, kv_indptr, kv_indices, kv_last_page_lens):
        check(x.dtype == torch.int32 and x.is_contiguous(), "read as int32")
    check((kv_last_page_lens == 1).all().item(), "a page of one token has one")
    scale = WIDTH**-0.5 if sm_scale is None else sm_scale
    keys, pages = row_view(kv_buffer).unsqueeze(1), kv_indptr.tolist()
    for s, (a, b) in enumerate(pairwise(qo_indptr.tolist())):
        check(b - a <= max_seqlen_q, "rows beyond max_seqlen_q get no program")
        seen = keys[kv_indices[pages[s] : pages[s + 1]].long()]
        o[a:b] = attended(q[a:b], seen, seen[..., :LATENT], scale, True, (-1, -1))
    return o
