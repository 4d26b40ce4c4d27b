"""Attention without state by AITER's kernels (CK, or assembly where it has one for the shape)."""

import torch
from torch import Tensor

from atomc import ops
from atomc.graph.sizes import known_equal
from atomc.kernels.aiter.library import Function, installed
from atomc.kernels.checks import (
    first_refusal,
    named,
    unaligned_heads,
    unlike,
    unsupported,
    wrong_rank,
)
from atomc.kernels.row_views import with_lead
from atomc.ops.formats import HALVES
from atomc.ops.op import Refusal

flash_attn_func = Function(
    "flash_attn_func", "aiter", takes=["softmax_scale", "causal", "window_size"]
)
WIDEST = 256


def _masked_otherwise(q: Tensor, k: Tensor, causal: bool, window: int) -> Refusal | None:
    if causal and not known_equal(q.shape[-3], k.shape[-3]):
        return Refusal(
            "argument",
            "AITER aligns a causal mask with the last key, and there may be more or fewer keys "
            "than queries",
        )
    if window and not causal:
        return Refusal("argument", "AITER's window ends at the query, here later keys are seen")
    return single_key(window)


def single_key(window: int) -> Refusal | None:
    """AITER takes a window of one key for none when it picks a kernel, which then refuses it."""
    if window == 1:
        return Refusal("argument", "AITER has no kernel for a window of one key")
    return None


@ops.attention.kernel(
    "aiter",
    refuses=first_refusal(
        installed(flash_attn_func),
        named("q k v", unlike, HALVES),
        named("mask sinks softcap", unsupported, "AITER's attention"),
        named("q", wrong_rank, (3, 4)),
        _masked_otherwise,
        lambda q, v: unaligned_heads(q, v, WIDEST),
    ),
)
def attention(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, window: int) -> Tensor:
    if not q.numel() or not k.numel():
        return q.new_zeros((*q.shape[:-1], v.shape[-1]))
    q4, k4, v4 = (x if x.dim() == 4 else x.unsqueeze(0) for x in (q, k, v))
    # A causal mask ends the window. AITER's fastest kernels want to see no other end.
    seen = (window - 1 if window else -1, -1, 0)
    # Its op is an autograd function, which wants to save what it is given.
    with torch.no_grad():
        out: Tensor = flash_attn_func(
            q4, k4, v4, softmax_scale=scale, causal=causal, window_size=seen
        )
    return with_lead(out.contiguous(), q)
