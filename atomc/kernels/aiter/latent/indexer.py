"""The indexer of sparse attention over a cache in fp8 by AITER (DeepSeek-V3.2): the write of its
keys, the scores of cached keys, and the choice of the best.

A row of the cache is a page of one token, as ATOM has it: its codes, and the bytes of their scale.
AITER multiplies queries in fp8 by the codes. Each row of a step is a sequence of its own that ends
with it, so that all steps are one case; the choice is AITER's stable one, in ascending order, which
prefers the first of equal scores.
"""

import torch
from torch import Tensor

from atomc import ops
from atomc.kernels.aiter.latent.latent_walk import visible_keys
from atomc.kernels.aiter.library import FP8_OF, Function, installed
from atomc.kernels.checks import first_refusal, named, scattered_slots, unlike
from atomc.kernels.row_views import as_heads, as_rows
from atomc.ops.formats import FLOATS
from atomc.ops.indexer import SCALE_BYTES
from atomc.ops.op import Refusal
from atomc.platform import Platform

indexer_k_quant_and_cache = Function("indexer_k_quant_and_cache", "aiter")
deepgemm_fp8_paged_mqa_logits = Function(
    "deepgemm_fp8_paged_mqa_logits",
    "aiter.ops.triton.attention.pa_mqa_logits",
    takes=["KVBlockSize"],
)
top_k_per_row_decode = Function("top_k_per_row_decode", "aiter", takes=["k", "stable"])
WIDTH = 128  # of a key, for which AITER's kernels are written
HEADS = (32, 64, 128)  # whose products its kernel tiles
TOPK = 2048  # the only number of chosen keys that ATOM has AITER choose
SCORE_BYTES = 256 * 2**20


def _uncached(platform: Platform, index_cache: Tensor) -> Refusal | None:
    """Why AITER does not read and write this cache."""
    native = FP8_OF[platform.arch]
    if index_cache.dtype != native:
        return Refusal("dtype", f"the cache is {index_cache.dtype}, AITER's is {native}")
    if index_cache.shape[-1] != WIDTH + SCALE_BYTES:
        return Refusal(
            "shape", f"keys of {index_cache.shape[-1] - SCALE_BYTES} columns, AITER's have {WIDTH}"
        )
    if not index_cache.is_contiguous():
        return Refusal("layout", "the cache is not contiguous")
    return None


@ops.index_write.kernel(
    "aiter",
    layout="paged",
    refuses=first_refusal(
        installed(indexer_k_quant_and_cache), named("k", unlike, FLOATS), _uncached, scattered_slots
    ),
)
def index_write(k: Tensor, index_cache: Tensor, slots: Tensor) -> Tensor:
    rows = k.reshape(-1, WIDTH).contiguous()
    if len(rows):
        indexer_k_quant_and_cache(
            rows, index_cache.view(-1, 1, WIDTH + SCALE_BYTES), slots, WIDTH, ""
        )
    return k.new_empty((0,))


def _other_queries(q: Tensor, topk: int) -> Refusal | None:
    if topk != TOPK:
        return Refusal("argument", f"{topk} chosen keys: AITER is used for {TOPK}")
    if q.shape[-2] not in HEADS:
        return Refusal("shape", f"{q.shape[-2]} heads: AITER's kernel takes {HEADS}")
    return None


@ops.paged_index_topk.kernel(
    "aiter",
    layout="paged",
    refuses=first_refusal(
        installed(deepgemm_fp8_paged_mqa_logits, top_k_per_row_decode),
        _other_queries,
        lambda platform, q: unlike((FP8_OF[platform.arch],), q=q),
        named("weights", unlike, (torch.float32,)),
        _uncached,
    ),
)
def paged_index_topk(
    q: Tensor,
    weights: Tensor,
    index_cache: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    block_tables: Tensor,
    topk: int,
) -> Tensor:
    rows = as_heads(q).contiguous()
    by_row = as_rows(weights).contiguous()
    block_size = index_cache.shape[1]
    capacity = block_tables.shape[1] * block_size
    chosen = torch.empty((len(rows), topk), dtype=torch.int32, device=q.device)
    if not len(rows) or not len(seq_lens):
        return chosen.fill_(-1).view(*q.shape[:-2], topk)
    of, lengths = visible_keys(len(rows), query_start, seq_lens)
    offset = torch.arange(block_size, dtype=torch.int32, device=q.device)
    at_once = max(1, SCORE_BYTES // (4 * capacity))
    for first in range(0, len(rows), at_once):
        part = slice(first, first + at_once)
        pages = block_tables[of[part], :, None] * block_size + offset
        _choose(
            rows[part],
            by_row[part],
            index_cache,
            lengths[part],
            pages.flatten(1),
            chosen[part],
        )
    number = torch.arange(topk, device=q.device)
    chosen.masked_fill_(number >= lengths[:, None], -1)
    return chosen.view(*q.shape[:-2], topk)


def _choose(
    q: Tensor,
    weights: Tensor,
    index_cache: Tensor,
    lengths: Tensor,
    pages: Tensor,
    chosen: Tensor,
) -> None:
    """Into chosen [rows, topk]: the best of the first `lengths` keys in pages [rows, capacity];
    what is behind the last one is not defined.
    """
    rows, capacity = pages.shape
    lengths = lengths.clamp(min=1)  # also for padding: a row without keys is none of AITER's cases
    scores = q.new_empty((rows, capacity), dtype=torch.float32)
    deepgemm_fp8_paged_mqa_logits(
        q.unsqueeze(1),
        index_cache.view(-1, 1, 1, WIDTH + SCALE_BYTES),
        weights,
        scores,
        lengths,
        pages,
        capacity,
        KVBlockSize=1,
    )
    topk = chosen.shape[1]
    top_k_per_row_decode(
        scores, 1, lengths, chosen, rows, scores.stride(0), scores.stride(1), k=topk, stable=True
    )
