"""Attention over chosen rows of a paged latent cache by AITER's assembly (DeepSeek-V3.2), with the
projections of keys and values absorbed: each row of a step is a sequence whose pages are its chosen
rows, so that all steps are decode steps.

How many rows are chosen follows from the lengths, so that the division of the work of a decode step
is the same for all layers.
"""

import torch
from torch import Tensor

from atomc import ops
from atomc.kernels.aiter.attention.unified_attention import blank_padding
from atomc.kernels.aiter.latent.latent_attention import (
    Division,
    attend_rows,
    division,
    padded,
    unattended_rows,
)
from atomc.kernels.aiter.latent.latent_walk import visible_keys
from atomc.kernels.checks import first_refusal
from atomc.kernels.row_views import as_heads, with_lead
from atomc.ops.op import Refusal


def refuse_all_keys(chosen: Tensor | None) -> Refusal | None:
    if chosen is None:
        return Refusal("argument", "AITER's kernel for chosen keys, and none are chosen")
    return None


def _division(
    seq_lens: Tensor, topk: int, heads: int, q_dtype: torch.dtype, kv_dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """The Division of a decode step in which each row reads at most `topk` keys."""
    return division(seq_lens.clamp(max=topk), heads, q_dtype, kv_dtype)


def _constants(
    q: Tensor, kv_cache: Tensor, chosen: Tensor
) -> tuple[int, int, torch.dtype, torch.dtype]:
    return chosen.shape[-1], padded(q.shape[-2]), q.dtype, kv_cache.dtype


@ops.mla_absorbed_attention.kernel(
    "aiter",
    layout="paged",
    refuses=first_refusal(refuse_all_keys, unattended_rows),
    shared=ops.Shared(_division, ("seq_lens",), _constants),
)
def mla_absorbed_attention(
    q: Tensor,
    kv_cache: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    block_tables: Tensor,
    kv_scale: Tensor | None,
    latent: int,
    scale: float,
    chosen: Tensor | None,
    shared: tuple[Tensor, ...],
) -> Tensor:
    assert chosen is not None
    rows, by_row = as_heads(q), chosen.flatten(0, -2)
    tokens, heads, _ = rows.shape
    out = q.new_zeros((tokens, padded(heads), latent))
    if tokens and seq_lens.shape[0]:
        sequence_of_row, num_keys = visible_keys(tokens, query_start, seq_lens)
        if tokens != seq_lens.shape[0]:
            shared = _division(num_keys, *_constants(q, kv_cache, chosen))
        divided = Division(*shared)
        slots = chosen_slots(by_row, sequence_of_row, block_tables, kv_cache.shape[1])
        pages = _joined(slots, divided.page_start)
        attend_rows(rows, kv_cache, out, pages, divided, kv_scale, scale)
        blank_padding(out, query_start, seq_lens)
    return with_lead(out[:, :heads].contiguous(), q)


def chosen_slots(
    chosen: Tensor, sequence_of_row: Tensor, block_tables: Tensor, block_size: int
) -> Tensor:
    """The slots [T, K] i32 of chosen positions [T, K] in these sequences, [T]; -1: none."""
    position = chosen.clamp(min=0)
    blocks = block_tables[sequence_of_row].gather(1, (position // block_size).long())
    slots = blocks * block_size + position % block_size
    return torch.where(chosen < 0, -1, slots).to(torch.int32)


def _joined(slots: Tensor, page_start: Tensor) -> Tensor:
    """The first slots of each row [T, K], one row behind the other: those of row t from
    page_start[t] up to page_start[t + 1]. [T * K] i32; what is behind the last row is not defined.
    A row of padding has one slot, which is 0.
    """
    rows, topk = slots.shape
    page = torch.arange(rows * topk, device=slots.device)
    row = torch.searchsorted(page_start[1:], page, right=True).clamp_(max=rows - 1)
    return slots[row, (page - page_start[row]).clamp_(max=topk - 1)].clamp_(min=0)
