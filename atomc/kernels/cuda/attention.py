"""Attention without state by cuDNN, for prompts of static length, as in `generate` with a static
cache.

Not for a paged cache: torch's interface to cuDNN takes no block tables and aligns a causal mask
with the first key, and its form for ragged sequences builds a plan in each call.
"""

import torch
from torch import Tensor

from atomc import ops
from atomc.kernels.checks import (
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


def refuse_attention(
    platform: Platform,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    sinks: Tensor | None,
    window: int,
    softcap: float,
) -> Refusal | None:
    return (
        older_than((8, 0), platform, "cuDNN's attention runs")
        or unsupported(
            "torch's interface to cuDNN's attention",
            mask=mask,
            sinks=sinks,
            window=window,
            softcap=softcap,
        )
        or unlike(HALVES, q=q, k=k, v=v)
        or wrong_rank((3, 4), q=q)
        or _unplanned(q, k, v)
        or unaligned_heads(
            q, v, 256 if platform.capability == (9, 0) else 128
        )  # only Hopper supports heads of 256
        or strided(q=q, k=k, v=v)
    )


def _unplanned(*tensors: Tensor) -> Refusal | None:
    if all(isinstance(size, int) for tensor in tensors for size in tensor.shape):
        return None
    return Refusal("shape", "cuDNN builds a plan per length, and the length is dynamic")


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
