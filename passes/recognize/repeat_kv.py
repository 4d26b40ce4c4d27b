"""Keys and values repeated for grouped queries need not be: attention reads them by group.

    k > [:, :, None] > expand > reshape > transpose -+
    v > [:, :, None] > expand > reshape > transpose -+- attention    =>    attention(q, k.transpose, v.transpose)
                                                 q -+
"""

from typing import Any

import torch
from torch import Tensor

from atomc import ops
from atomc.rewrite import Rewrite, tensor_example

transpose = torch.ops.aten.transpose.int


def _repeated(x: Tensor, group: int) -> Tensor:
    batch, heads, length, width = x.shape
    spread = x.unsqueeze(2).expand(batch, heads, group, length, width)
    return spread.reshape(batch, heads * group, length, width).transpose(1, 2)


def _pattern(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> Tensor:
    group = q.shape[2] // k.shape[1]
    return ops.attention(q, _repeated(k, group), _repeated(v, group), scale=scale, causal=causal)  # type: ignore[no-any-return]


def _replacement(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> Tensor:
    return ops.attention(q, transpose(k, 1, 2), transpose(v, 1, 2), scale=scale, causal=causal)  # type: ignore[no-any-return]


def _masked_pattern(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, causal: bool) -> Tensor:
    group = q.shape[2] // k.shape[1]
    return ops.attention(q, _repeated(k, group), _repeated(v, group), None, mask, scale=scale, causal=causal)  # type: ignore[no-any-return]


def _masked_replacement(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, causal: bool) -> Tensor:
    return ops.attention(q, transpose(k, 1, 2), transpose(v, 1, 2), None, mask, scale=scale, causal=causal)  # type: ignore[no-any-return]


def _example() -> dict[str, Any]:
    return {"q": tensor_example(2, 5, 21, 12), "k": tensor_example(2, 3, 11, 12), "v": tensor_example(2, 3, 11, 12),
            "scale": 0.25, "causal": False}  # fmt: skip


def _masked_example(dtype: torch.dtype) -> dict[str, Any]:
    return {**_example(), "mask": torch.zeros(5, 11, dtype=dtype)}


REPEAT_KV = [
    Rewrite("repeat_kv", pattern, replacement, example, variant=variant, needs={"aten::expand": {}})
    for variant, pattern, replacement, example in (
        ("", _pattern, _replacement, _example),
        ("bool mask", _masked_pattern, _masked_replacement, lambda: _masked_example(torch.bool)),
        ("float mask", _masked_pattern, _masked_replacement, lambda: _masked_example(torch.bfloat16)),
    )
]
