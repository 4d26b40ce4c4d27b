"""Attention without state by cuDNN, for prompts of static length, as in `generate` with a static
cache.

Not for a paged cache: torch's interface to cuDNN takes no block tables and aligns a causal mask
with the first key, and its form for ragged sequences builds a plan in each call.
"""

import torch
from torch import Tensor

from atomc import ops
from atomc.kernels.checks import (
    first_refusal,
    named,
    older_than,
    strided,
    unaligned_heads,
    unlike,
    unsupported,
    wrong_rank,
)
from atomc.kernels.row_views import with_lead
from atomc.ops.formats import HALVES
from atomc.ops.op import Refusal
from atomc.platform import Platform


def _unplanned(q: Tensor, k: Tensor, v: Tensor) -> Refusal | None:
    if all(isinstance(size, int) for tensor in (q, k, v) for size in tensor.shape):
        return None
    return Refusal("shape", "cuDNN builds a plan per length, and the length is dynamic")


def _wide_heads(platform: Platform, q: Tensor, v: Tensor) -> Refusal | None:
    # Only Hopper supports heads of 256.
    return unaligned_heads(q, v, 256 if platform.capability == (9, 0) else 128)


refuse_attention = first_refusal(
    lambda platform: older_than((8, 0), platform, "cuDNN's attention runs"),
    named("mask sinks window softcap", unsupported, "torch's interface to cuDNN's attention"),
    named("q k v", unlike, HALVES),
    named("q", wrong_rank, (3, 4)),
    _unplanned,
    _wide_heads,
    named("q k v", strided),
)


@ops.attention.kernel("cuda", refuses=refuse_attention)
def attention(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> Tensor:
    if not q.numel() or not k.numel():
        return q.new_zeros((*q.shape[:-1], v.shape[-1]))
    q4, k4, v4 = (x.view(-1, *x.shape[-3:]).transpose(1, 2) for x in (q, k, v))
    # Not scaled_dot_product_attention, which would choose among its backends.
    results = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q4, k4, v4, None, False, is_causal=causal, scale=scale
    )
    return with_lead(results[0].transpose(1, 2).contiguous(), q)
