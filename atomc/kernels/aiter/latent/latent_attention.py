"""Attention over a paged latent cache by AITER's assembly, with the projections of keys and values
absorbed.

A row of the cache is a page of one token, as ATOM has it, so that a page is a slot. The indices of
these pages and AITER's division of the work are the same for all layers and computed once a step.
Assembly has heads by 16: rows of zeros are added, and their results dropped. Decode steps take its
persistent kernel; other steps its kernel for prompts where that has the heads, or the Triton
kernels.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from atomc import ops
from atomc.kernels.aiter.attention.paged_attention import slots_of_keys
from atomc.kernels.aiter.attention.unified_attention import blank_padding
from atomc.kernels.aiter.latent.latent_walk import (
    attended_latents,
    refuse_chosen,
    unattended_latents,
)
from atomc.kernels.aiter.library import FP8_OF, Function, installed
from atomc.kernels.checks import first_refusal, named, scattered_blocks, strided, unlike
from atomc.kernels.row_views import as_heads, with_lead
from atomc.ops.op import Refusal
from atomc.ops.state import LAYOUTS
from atomc.platform import Platform

mla_decode_fwd = Function(
    "mla_decode_fwd",
    "aiter.mla",
    takes=["page_size", "sm_scale", "num_kv_splits", "work_info_set", "kv_scale"],
)
mla_prefill_fwd = Function("mla_prefill_fwd", "aiter.mla", takes=["sm_scale"])
get_mla_metadata_info_v1 = Function(
    "get_mla_metadata_info_v1", "aiter", takes=["is_sparse", "max_split_per_batch"]
)
get_mla_metadata_v1 = Function(
    "get_mla_metadata_v1", "aiter", takes=["page_size", "uni_seqlen_qo", "dtype_q", "dtype_kv"]
)
LATENT, ROTATED = 512, 64  # the widths of its assembly
HEADS, MOST_HEADS = 16, 128
# Of the keys of a sequence, at most so many parts: the number that AITER's tests take.
PARTS = 32
# Heads, as assembly counts them, of its kernel for prompts.
PROMPT_HEADS = (16, 128)


class Division(NamedTuple):
    """A step whose rows are sequences, as AITER describes it, without its pages; what
    get_mla_metadata_v1 writes is in the order of get_mla_metadata_info_v1.
    """

    query_start: Tensor  # [S + 1] i32: row s is of sequence s
    page_start: Tensor  # [S + 1] i32
    last_page_lens: Tensor  # [S] i32
    work_meta_data: Tensor
    work_indptr: Tensor
    work_info_set: Tensor
    reduce_indptr: Tensor
    reduce_final_map: Tensor
    reduce_partial_map: Tensor


def division(
    num_keys: Tensor, heads: int, q_dtype: torch.dtype, kv_dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """The Division of rows that read so many keys, [S] i32. A row without keys, which is padding,
    gets one.
    """
    sequences, device = num_keys.shape[0], num_keys.device
    page_start = torch.zeros(sequences + 1, dtype=torch.int32, device=device)
    torch.cumsum(num_keys.clamp(min=1), 0, dtype=torch.int32, out=page_start[1:])
    rows = torch.arange(sequences + 1, dtype=torch.int32, device=device)
    last_page_lens = torch.ones_like(num_keys)
    sizes = get_mla_metadata_info_v1(
        sequences,
        1,
        heads,
        q_dtype,
        kv_dtype,
        is_sparse=False,
        num_kv_splits=PARTS,
        max_split_per_batch=PARTS,
    )
    pointers, work_indptr, work_info_set, *reduced = (
        torch.empty(size, dtype=dtype, device=device) for size, dtype in sizes
    )
    get_mla_metadata_v1(
        rows,
        page_start,
        last_page_lens,
        heads,
        1,
        True,
        pointers,
        work_info_set,
        work_indptr,
        *reduced,
        page_size=1,
        kv_granularity=16,
        max_seqlen_qo=1,
        uni_seqlen_qo=1,
        max_split_per_batch=PARTS,
        dtype_q=q_dtype,
        dtype_kv=kv_dtype,
    )
    return Division(
        rows, page_start, last_page_lens, pointers, work_indptr, work_info_set, *reduced
    )


def schedule(
    seq_lens: Tensor,
    block_tables: Tensor,
    heads: int,
    block_size: int,
    q_dtype: torch.dtype,
    kv_dtype: torch.dtype,
) -> tuple[Tensor, ...]:
    """The pages of all sequences of a decode step, [>= number of keys] i32, then its Division."""
    divided = division(seq_lens, heads, q_dtype, kv_dtype)
    page_start = divided[1]
    return slots_of_keys(page_start, block_tables, block_size).to(torch.int32), *divided


def _constants(q: Tensor, kv_cache: Tensor) -> tuple[int, int, torch.dtype, torch.dtype]:
    block_size = kv_cache.shape[1]
    if not isinstance(block_size, int):  # where a graph leaves it open it is the layout's
        block_size = LAYOUTS["paged"].block_size
    return padded(q.shape[-2]), block_size, q.dtype, kv_cache.dtype


def padded(heads: int) -> int:
    return -(-heads // HEADS) * HEADS


def _other_widths(q: Tensor, latent: int) -> Refusal | None:
    rotated = q.shape[-1] - latent
    if (latent, rotated) == (LATENT, ROTATED):
        return None
    return Refusal(
        "shape",
        f"a latent of {latent} and {rotated} rotated columns: AITER's assembly has {LATENT} and "
        f"{ROTATED}",
    )


def _other_heads(platform: Platform, q: Tensor, kv_cache: Tensor) -> Refusal | None:
    heads = q.shape[-2]
    if heads > MOST_HEADS:
        return Refusal("shape", f"{heads} heads: AITER's assembly takes up to {MOST_HEADS}")
    if platform.arch == "gfx942" and padded(heads) == 32 and kv_cache.dtype == torch.bfloat16:
        return Refusal("shape", f"{heads} heads: AITER does not support 32 on gfx942 in bfloat16")
    return None


def _unread(platform: Platform, kv_cache: Tensor, kv_scale: Tensor | None) -> Refusal | None:
    codes = FP8_OF[platform.arch]
    if kv_cache.dtype == torch.bfloat16 and kv_scale is None:
        return None
    if kv_cache.dtype != codes or kv_scale is None:
        return Refusal(
            "dtype",
            f"the cache is {kv_cache.dtype}: AITER's assembly reads torch.bfloat16, or {codes} "
            "with a scale",
        )
    return None


# Why `attend_rows` does not serve a call.
unattended_rows = first_refusal(
    installed(mla_decode_fwd, get_mla_metadata_info_v1, get_mla_metadata_v1),
    named("q", unlike, (torch.bfloat16,)),
    _other_widths,
    _other_heads,
    _unread,
    lambda kv_cache: scattered_blocks(kv_cache),
    named("kv_cache", strided),
)


def _runs_in_assembly(heads: int, kv_dtype: torch.dtype) -> bool:
    """Whether steps other than decode steps run in assembly."""
    return heads in PROMPT_HEADS and kv_dtype == torch.bfloat16


def _unwalked(
    platform: Platform, q: Tensor, kv_cache: Tensor, kv_scale: Tensor | None, latent: int
) -> Refusal | None:
    """Why the Triton kernels do not serve the steps that they take."""
    if _runs_in_assembly(padded(q.shape[-2]), kv_cache.dtype):
        return None
    return unattended_latents(platform, q, kv_cache, kv_scale, latent)


@ops.mla_absorbed_attention.kernel(
    "aiter",
    layout="paged",
    refuses=first_refusal(refuse_chosen, unattended_rows, installed(mla_prefill_fwd), _unwalked),
    shared=ops.Shared(schedule, ("seq_lens", "block_tables"), _constants),
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
    shared: tuple[Tensor, ...],
) -> Tensor:
    rows = as_heads(q)
    tokens, heads, _ = rows.shape
    decode = tokens == seq_lens.shape[0]
    if not decode and not _runs_in_assembly(padded(heads), kv_cache.dtype):
        return attended_latents(
            q, kv_cache, query_start, seq_lens, block_tables, kv_scale, latent, scale
        )
    # Rows of no sequence are not written.
    out = q.new_zeros((tokens, padded(heads), latent))
    if tokens:
        pages, *divided = shared
        divided_rows = Division(*divided)
        if decode:
            attend_rows(rows, kv_cache, out, pages, divided_rows, kv_scale, scale)
            blank_padding(out, query_start, seq_lens)
        else:
            mla_prefill_fwd(
                with_padded_heads(rows),
                kv_cache.view(-1, 1, 1, kv_cache.shape[-1]),
                out,
                query_start,
                divided_rows.page_start,
                pages,
                divided_rows.last_page_lens,
                tokens,  # so many rows a sequence has at most
                sm_scale=scale,
            )
    return with_lead(out[:, :heads].contiguous(), q)


def with_padded_heads(q: Tensor) -> Tensor:
    """q [T, H, L + R] with rows of zeros behind its heads, contiguous."""
    heads = q.shape[1]
    return F.pad(q, (0, 0, 0, padded(heads) - heads)).contiguous()


def attend_rows(
    q: Tensor,
    kv_cache: Tensor,
    out: Tensor,
    pages: Tensor,
    divided: Division,
    kv_scale: Tensor | None,
    scale: float,
) -> None:
    """Into out [T, padded heads, L]: each row of q [T, H, L + R] over its pages."""
    # Where AITER folds heads into rows it gives `out` another memory, if there are several tokens a
    # sequence; here is one.
    mla_decode_fwd(
        with_padded_heads(q),
        kv_cache.view(-1, 1, 1, kv_cache.shape[-1]),
        out,
        divided.query_start,
        divided.page_start,
        pages,
        divided.last_page_lens,
        1,
        page_size=1,
        nhead_kv=1,
        sm_scale=scale,
        num_kv_splits=PARTS,
        work_meta_data=divided.work_meta_data,
        work_indptr=divided.work_indptr,
        work_info_set=divided.work_info_set,
        reduce_indptr=divided.reduce_indptr,
        reduce_final_map=divided.reduce_final_map,
        reduce_partial_map=divided.reduce_partial_map,
        kv_scale=kv_scale,
    )
