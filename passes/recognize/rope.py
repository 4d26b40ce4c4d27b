"""Rotary positions become one op; its meaning, traced once per style, is the pattern.

x * cos + cat(-x[half:], x[:half]) * sin           =>    rope(x, cos, sin, "neox"), and the other
                                                   styles
cat(rope(x[:r], cos, sin), x[r:])                  =>    rope(x, cos, sin), partial
"""

from typing import Any

import torch
from torch import Tensor

from atomc import ops
from atomc.graph.sizes import known_equal, spell_shape
from atomc.ops.rope import ROPE_STYLES, rotate
from atomc.rewriting.matching.captures import OneOf
from atomc.rewriting.rewrite import Case, Rewrite, tensor_example


def turns_pairs(x: Tensor, cos: Tensor, sin: Tensor, **_: object) -> str | None:
    """x is made of pairs. The tables have one shape, and every dimension but the last is 1 or that
    of x.
    """
    if isinstance(x.shape[-1], int) and x.shape[-1] % 2:
        return f"{x.shape[-1]} columns are no pairs"
    if cos.dim() > x.dim() or len(cos.shape) != len(sin.shape):
        return (
            f"cos {spell_shape(cos.shape)} and sin {spell_shape(sin.shape)} for x "
            f"{spell_shape(x.shape)}"
        )
    for size, of_x in zip(reversed(cos.shape[:-1]), reversed(x.shape[:-1]), strict=False):
        if not (known_equal(size, 1) or known_equal(size, of_x)):
            return f"cos {spell_shape(cos.shape)} is not broadcast to x {spell_shape(x.shape)}"
    return None


def _pattern(x: Tensor, cos: Tensor, sin: Tensor, style: str) -> Tensor:
    return rotate(x, cos, sin, style)


def _replacement(x: Tensor, cos: Tensor, sin: Tensor, style: str) -> Tensor:
    return ops.rope(x, cos, sin, style)


def _example(style: str) -> dict[str, Any]:
    width = 12 // _columns_of_an_angle(style)
    return {
        "x": tensor_example(3, 12),
        "cos": tensor_example(width),
        "sin": tensor_example(width),
        "style": style,
    }


def _partial_pattern(x: Tensor, cos: Tensor, sin: Tensor, style: str) -> Tensor:
    width = cos.shape[-1] * _columns_of_an_angle(style)
    return torch.cat((ops.rope(x[..., :width], cos, sin, style), x[..., width:]), -1)


def _partial_example(style: str) -> dict[str, Any]:
    return {**_example(style), "x": tensor_example(3, 22), "style": OneOf(style)}


def _columns_of_an_angle(style: str) -> int:
    """How many columns of x a column of cos and sin is for."""
    return 1 if style == "neox" else 2


def _attrs(style: str, **_: object) -> dict[str, Any]:
    return {"style": style}


_STYLES = [Case(style, {"style": style}) for style in ROPE_STYLES]
ROPE = Rewrite(
    "rope", _pattern, _replacement, _example, guard=turns_pairs, attrs=_attrs, cases=_STYLES
)
ROPE_PARTIAL = Rewrite(
    "rope_partial",
    _partial_pattern,
    _replacement,
    _partial_example,
    attrs=_attrs,
    cases=_STYLES,
    needs={"aten::slice": {}},
)
