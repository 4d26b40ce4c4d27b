"""Attention without state by cuDNN: prompts of a fixed length, as `generate` with a static cache has them.

Not over a paged cache: torch's entry to cuDNN takes no block tables and aligns a causal mask with the first key, and its
form for ragged sequences plans anew at each call.
"""

import torch
from torch import Tensor

from atomc import ops
from atomc.op import Refusal
from atomc.platform import Platform


def _out_of_reach(
    platform: Platform, q: Tensor, k: Tensor, v: Tensor, kv: Tensor | None = None, mask: Tensor | None = None,
    sinks: Tensor | None = None, *, window: int = 0, softcap: float = 0.0, **_: object,
) -> Refusal | None:  # fmt: skip
    if not platform.is_cuda or platform.capability is None or platform.capability < (8, 0):
        return Refusal("hardware", "cuDNN's attention runs on NVIDIA GPUs from sm80 on")
    for name, given in (("mask", mask is not None), ("sinks", sinks is not None), ("window", window), ("softcap", softcap)):
        if given:
            return Refusal("argument", f"torch's entry to cuDNN's attention takes no {name}")
    if q.dtype not in (torch.bfloat16, torch.float16) or not q.dtype == k.dtype == v.dtype:
        return Refusal(
            "dtype", f"q, k and v are {q.dtype}, {k.dtype} and {v.dtype}: cuDNN takes 16-bit ones that are alike"
        )
    if q.dim() not in (3, 4):
        return Refusal("shape", f"q has {q.dim()} dimensions: written for 3 or 4")
    if not all(isinstance(size, int) for x in (q, k, v) for size in x.shape):
        return Refusal("shape", "cuDNN makes a plan for each length, and here the length varies")
    # Heads of 256 are for Hopper alone.
    widest = 256 if platform.capability == (9, 0) else 128
    if any(width % 8 or width > widest for width in (q.shape[-1], v.shape[-1])):
        return Refusal(
            "shape",
            f"heads of {q.shape[-1]} and {v.shape[-1]}: cuDNN takes multiples of 8 up to {widest} on {platform.arch}",
        )
    if any(x.shape[-1] > 1 and x.stride(-1) != 1 for x in (q, k, v)):
        return Refusal("layout", "the last dimension of q, k or v is not contiguous")
    return None


@ops.attention.kernel("cuda", refuses=_out_of_reach)
def attention(
    q: Tensor, k: Tensor, v: Tensor, kv: Tensor | None = None, mask: Tensor | None = None,
    sinks: Tensor | None = None, *, scale: float, causal: bool = True, window: int = 0, softcap: float = 0.0,
) -> Tensor:  # fmt: skip
    if not q.numel() or not k.numel():
        return q.new_zeros((*q.shape[:-1], v.shape[-1]))
    q4, k4, v4 = (x.view(-1, *x.shape[-3:]).transpose(1, 2) for x in (q, k, v))
    # The op itself: scaled_dot_product_attention would pick among its backends.
    found = torch.ops.aten._scaled_dot_product_cudnn_attention(q4, k4, v4, None, False, is_causal=causal, scale=scale)
    out: Tensor = found[0]
    return out.transpose(1, 2).contiguous().view(*q.shape[:-1], v.shape[-1])
