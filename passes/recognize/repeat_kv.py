"""Remove the repetition of keys and values for grouped queries: attention reads them by group.

   k > [:, :, None] > expand > reshape > transpose -+
   v > [:, :, None] > expand > reshape > transpose -+- attention
                                                 q -+
=>
   attention(q, k.transpose, v.transpose)
"""

import torch
from torch import Tensor

from atomc import ops
from atomc.passes.typed_aten import transpose
from atomc.rewriting.example import Example, OneOf, tensor_example
from atomc.rewriting.rewrite import Case, Rewrite


def _repeated(x: Tensor, group: int) -> Tensor:
    batch, heads, length, width = x.shape
    spread = x.unsqueeze(2).expand(batch, heads, group, length, width)
    return spread.reshape(batch, heads * group, length, width).transpose(1, 2)


def _pattern(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, causal: bool
) -> Tensor:
    group = q.shape[2] // k.shape[1]
    return ops.attention(
        q, _repeated(k, group), _repeated(v, group), None, mask, scale=scale, causal=causal
    )


def _replacement(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, causal: bool
) -> Tensor:
    masked = () if mask is None else (None, mask)
    return ops.attention(
        q, transpose(k, 1, 2), transpose(v, 1, 2), *masked, scale=scale, causal=causal
    )


def _example(masked: bool, heads: int = 3) -> Example:
    return {
        "q": tensor_example(2, 5, 21, 12),
        "k": tensor_example(2, heads, 11, 12),
        "v": tensor_example(2, heads, 11, 12),
        "mask": tensor_example(5, 11, dtype=OneOf(torch.bool, torch.bfloat16)) if masked else None,
        "scale": 0.25,
        "causal": OneOf(False, True),
    }


REPEAT_KV = Rewrite(
    "repeat_kv",
    _pattern,
    _replacement,
    _example,
    attrs=lambda causal, **_: {"causal": causal},
    needs={"aten::expand": {}},
    cases=[
        Case("", {"masked": False}),
        Case("mask", {"masked": True}),
        # The reshape of one repeated head is a view.
        Case("one head", {"masked": False, "heads": 1}),
        Case("one head, mask", {"masked": True, "heads": 1}),
    ],
)
