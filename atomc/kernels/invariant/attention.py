"""Attention without splits, with one tile for all steps: the keys of a row are always summed from
the first one.
"""

from typing import Unpack

import triton
from torch import Tensor

from atomc import ops
from atomc.kernels.checks import first_refusal
from atomc.kernels.row_views import as_heads, with_lead
from atomc.kernels.triton.attention import attention as varying
from atomc.kernels.triton.attention import varlen_attention as packed
from atomc.kernels.triton.attention.attention_tiles import Tiling
from atomc.ops.attention import PagedOperands
from atomc.ops.op import Refusal


def _tiling(group: int, width: int, itemsize: int) -> Tiling:
    """The tiling of all steps."""
    least = max(16, triton.next_power_of_2(group))
    if itemsize == 4:
        return Tiling(max(least, 32), 16 if width > 128 else 32, 1, 8, 2)
    return Tiling(max(least, 64), 32 if width > 128 else 64, 1, 4, 2)


def refuse_windows(window: int) -> Refusal | None:
    if window:
        return Refusal(
            "argument",
            f"with a window of {window} the first key of a tile depends on the tile's other rows",
        )
    return None


@ops.paged_attention.kernel(
    "invariant",
    layout="paged",
    refuses=first_refusal(refuse_windows, varying.refuse_paged_attention),
)
def paged_attention(q: Tensor, **operands: Unpack[PagedOperands]) -> Tensor:
    rows, kv_heads, width = as_heads(q), *operands["v_cache"].shape[-2:]
    if rows.shape[0] == 0:
        return q.new_empty((*q.shape[:-1], width))
    cut = _tiling(rows.shape[1] // kv_heads, max(rows.shape[2], width), q.element_size())
    return with_lead(varying.attend(rows, cut, **operands), q)


@ops.varlen_attention.kernel("invariant", refuses=packed.refuse_varlen_attention)
def varlen_attention(q: Tensor, k: Tensor, v: Tensor, query_start: Tensor, scale: float) -> Tensor:
    if q.shape[0] == 0:
        return q.new_empty((*q.shape[:-1], v.shape[-1]))
    cut = _tiling(q.shape[1] // k.shape[1], max(q.shape[2], v.shape[2]), q.element_size())
    return varying.attend_packed(q, k, v, query_start, scale, cut, causal=False)
