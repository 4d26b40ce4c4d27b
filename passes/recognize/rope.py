"""Rotary positions become one op; its meaning, traced once per style, is the pattern.

    x * cos + cat(-x[half:], x[:half]) * sin           =>    rope(x, cos, sin, "neox"), and the other styles
    cat(rope(x[:r], cos, sin), x[r:])                  =>    rope(x, cos, sin), partial
"""

from typing import Any

import torch
from torch import Tensor

from atomc import ops
from atomc.graph.sizes import known_equal, spell_shape
from atomc.ops.rope import ROPE_STYLES, rotate
from atomc.rewrite import Rewrite, tensor_example


def turns_pairs(x: Tensor, cos: Tensor, sin: Tensor, **_: object) -> str | None:
    """x is made of pairs. The tables have one shape, and every dimension but the last is 1 or that of x."""
    if isinstance(x.shape[-1], int) and x.shape[-1] % 2:
        return f"{x.shape[-1]} columns are no pairs"
    if cos.dim() > x.dim() or len(cos.shape) != len(sin.shape):
        return f"cos {spell_shape(cos.shape)} and sin {spell_shape(sin.shape)} for x {spell_shape(x.shape)}"
    for size, of_x in zip(reversed(cos.shape[:-1]), reversed(x.shape[:-1]), strict=False):
        if not (known_equal(size, 1) or known_equal(size, of_x)):
            return f"cos {spell_shape(cos.shape)} is not broadcast to x {spell_shape(x.shape)}"
    return None


def _rotation(style: str) -> Rewrite:
    width = 12 if style == "neox" else 6

    def pattern(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return rotate(x, cos, sin, style)

    def replacement(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return ops.rope(x, cos, sin, style)  # type: ignore[no-any-return]

    def example() -> dict[str, Any]:
        return {"x": tensor_example(3, 12), "cos": tensor_example(width), "sin": tensor_example(width)}

    return Rewrite("rope", pattern, replacement, example, guard=turns_pairs, variant=style,
                   attrs={"style": style})  # fmt: skip


def _partial(style: str) -> Rewrite:
    factor = 1 if style == "neox" else 2

    def pattern(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        width = cos.shape[-1] * factor
        return torch.cat((ops.rope(x[..., :width], cos, sin, style), x[..., width:]), -1)

    def replacement(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return ops.rope(x, cos, sin, style)  # type: ignore[no-any-return]

    def example() -> dict[str, Any]:
        return {"x": tensor_example(3, 22), "cos": tensor_example(12 // factor), "sin": tensor_example(12 // factor)}

    return Rewrite("rope_partial", pattern, replacement, example, variant=style, attrs={"style": style},
                   needs={"aten::slice": {}})  # fmt: skip


ROPE = [_rotation(style) for style in ROPE_STYLES]
ROPE_PARTIAL = [_partial(style) for style in ROPE_STYLES]
