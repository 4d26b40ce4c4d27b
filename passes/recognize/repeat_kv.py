"""Remove the repetition of keys and values for grouped queries: attention reads them by group.

   k > [:, :, None] > expand > reshape > transpose -+
   v > [:, :, None] > expand > reshape > transpose -+- attention
                                                 q -+
=>
   attention(q, k.transpose, v.transpose)
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from atomc import ops
from atomc.graph.canonical import call, value
from atomc.graph.sizes import known_equal
from atomc.passes.typed_aten import transpose
from atomc.rewriting.example import Example, OneOf, tensor_example
from atomc.rewriting.matching.pattern import Index
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


_HEADS = Case("", {"masked": False}), Case("mask", {"masked": True})
# The reshape of one repeated head is a view.
_ONE_HEAD = (
    Case("one head", {"masked": False, "heads": 1}),
    Case("one head, mask", {"masked": True, "heads": 1}),
)


def _cases(index: Index) -> Sequence[Case]:
    """Those for the numbers of heads that the graph repeats; most encoders repeat none."""
    spread = [value(operand) for node in index["expand"] for operand in call(node).operands]
    are_one = {known_equal(x.shape[1], 1) for x in spread if x.dim() == 5}
    return (*(_HEADS if False in are_one else ()), *(_ONE_HEAD if True in are_one else ()))


REPEAT_KV = Rewrite(
    "repeat_kv",
    _pattern,
    _replacement,
    _example,
    attrs=lambda causal, **_: {"causal": causal},
    needs={"aten::expand": {}},
    cases=(),
    cases_in=_cases,
)
