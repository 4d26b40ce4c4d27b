"""Move the transpose before the norm or rotation of heads behind it.

    rms_norm(x.transpose(1, 2), weight)    =>    rms_norm(x, weight).transpose(1, 2)
    rope(x.transpose(1, 2), cos, sin)      =>    rope(x, cos.T, sin.T).transpose(1, 2)

Models of transformers ([B, heads, T, D]) then have the same order as atomc's ([.., T, heads, D]),
and the transposes cancel. Latent attention rotates some columns of transposed heads; there, only
the other direction leads to this order:

    rope(x, cos, sin).transpose(1, 2)      =>    rope(x.transpose(1, 2), cos.T, sin.T)
"""

import torch
from torch import Tensor

from atomc import ops
from atomc.passes.typed_aten import transpose
from atomc.rewriting.example import Example, OneOf, tensor_example
from atomc.rewriting.rewrite import Rewrite


def _norm_pattern(x: Tensor, weight: Tensor, eps: float, style: str) -> Tensor:
    return ops.rms_norm(x.transpose(1, 2), weight, eps, style)


def _norm_replacement(x: Tensor, weight: Tensor, eps: float, style: str) -> Tensor:
    return transpose(ops.rms_norm(x, weight, eps, style), 1, 2)


def _norm_guard(x: Tensor, **_: object) -> str | None:
    return None if x.dim() == 4 else f"x has {x.dim()} dimensions"


def _norm_example() -> Example:
    return {
        "x": tensor_example(2, 5, 3, 22),
        "weight": tensor_example(22),
        "eps": 1e-6,
        "style": "after",
    }


def _rope_pattern(x: Tensor, cos: Tensor, sin: Tensor, style: str, in_fp32: bool) -> Tensor:
    return ops.rope(x.transpose(1, 2), cos, sin, style, in_fp32)


def _rope_replacement(x: Tensor, cos: Tensor, sin: Tensor, style: str, in_fp32: bool) -> Tensor:
    return transpose(ops.rope(x, transpose(cos, 1, 2), transpose(sin, 1, 2), style, in_fp32), 1, 2)


def _rope_guard(x: Tensor, cos: Tensor, **_: object) -> str | None:
    return None if cos.dim() == x.dim() == 4 else f"cos has {cos.dim()} dimensions, x {x.dim()}"


def _rope_example() -> Example:
    table = OneOf(torch.bfloat16, torch.float32)
    return {
        "x": tensor_example(2, 5, 3, 22),
        "cos": tensor_example(12, dtype=table),
        "sin": tensor_example(12, dtype=table),
        "style": "neox",
        "in_fp32": OneOf(False, True),
    }


def _rotated_pattern(x: Tensor, cos: Tensor, sin: Tensor, style: str, in_fp32: bool) -> Tensor:
    return ops.rope(x, cos, sin, style, in_fp32).transpose(1, 2)


def _rotated_replacement(x: Tensor, cos: Tensor, sin: Tensor, style: str, in_fp32: bool) -> Tensor:
    return ops.rope(transpose(x, 1, 2), transpose(cos, 1, 2), transpose(sin, 1, 2), style, in_fp32)


# The norm first: the transpose then precedes a rotation after it.
ROPE_BEFORE_TRANSPOSE = [
    Rewrite(
        "rope_before_transpose",
        _norm_pattern,
        _norm_replacement,
        _norm_example,
        _norm_guard,
        variant="rms_norm",
        needs={"aten::permute": {}},
    ),
    Rewrite(
        "rope_before_transpose",
        _rope_pattern,
        _rope_replacement,
        _rope_example,
        _rope_guard,
        needs={"aten::permute": {}},
    ),
]
TRANSPOSE_BEFORE_ROPE = Rewrite(
    "transpose_before_rope",
    _rotated_pattern,
    _rotated_replacement,
    _rope_example,
    _rope_guard,
    needs={"aten::permute": {}, "mla_attention": {}},
)
