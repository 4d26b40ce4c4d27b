"""What is done to keys right before they are written to the cache joins the write.

    q > rope ---------------> paged_attention          q -+
    k > rope > kv_write ----> token              =>       rope_kv_write -+-> q, token
    v -------^                                      k, v -+

    qk_norm_rope -+-> q                                    q -+
                  +-> k > kv_write -> token      =>           qk_norm_rope_kv_write -+-> q, token
    v ------------------^                               k, v -+

A cache in fp8 has scales, which go to the write as they are: the op, and its kernels, round to what the cache holds, so
that a quantizing write is the same op at a site of scheme "fp8".
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from atomc import ops
from atomc.ops.formats import FP8
from atomc.rewrite import Rewrite, tensor_example


def _rope_pattern(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor,
    style: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return ops.rope(q, cos, sin, style), ops.kv_write(ops.rope(k, cos, sin, style), v, k_cache, v_cache, slots)


def _rope_replacement(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor,
    style: str,
) -> Any:  # fmt: skip
    return ops.rope_kv_write(q, k, v, cos, sin, k_cache, v_cache, slots, rope_style=style)


def _scaled_rope_pattern(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor,
    k_scale: Tensor, v_scale: Tensor, style: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    token = ops.kv_write(ops.rope(k, cos, sin, style), v, k_cache, v_cache, slots, k_scale, v_scale)
    return ops.rope(q, cos, sin, style), token


def _scaled_rope_replacement(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor,
    k_scale: Tensor, v_scale: Tensor, style: str,
) -> Any:  # fmt: skip
    return ops.rope_kv_write(q, k, v, cos, sin, k_cache, v_cache, slots, k_scale, v_scale, style)


def _norm_pattern(
    q: Tensor, k: Tensor, v: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor,
    v_cache: Tensor, slots: Tensor, eps: float, norm_style: str, rope_style: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    q, k = ops.qk_norm_rope(q, k, q_weight, k_weight, cos, sin, eps, norm_style, rope_style)
    return q, ops.kv_write(k, v, k_cache, v_cache, slots)


def _norm_replacement(
    q: Tensor, k: Tensor, v: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor,
    v_cache: Tensor, slots: Tensor, eps: float, norm_style: str, rope_style: str,
) -> Any:  # fmt: skip
    return ops.qk_norm_rope_kv_write(q, k, v, q_weight, k_weight, cos, sin, eps, k_cache, v_cache, slots,
                                     norm_style=norm_style, rope_style=rope_style)  # fmt: skip


def _scaled_norm_pattern(
    q: Tensor, k: Tensor, v: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor,
    v_cache: Tensor, slots: Tensor, k_scale: Tensor, v_scale: Tensor, eps: float, norm_style: str, rope_style: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    q, k = ops.qk_norm_rope(q, k, q_weight, k_weight, cos, sin, eps, norm_style, rope_style)
    return q, ops.kv_write(k, v, k_cache, v_cache, slots, k_scale, v_scale)


def _scaled_norm_replacement(
    q: Tensor, k: Tensor, v: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor,
    v_cache: Tensor, slots: Tensor, k_scale: Tensor, v_scale: Tensor, eps: float, norm_style: str, rope_style: str,
) -> Any:  # fmt: skip
    return ops.qk_norm_rope_kv_write(q, k, v, q_weight, k_weight, cos, sin, eps, k_cache, v_cache, slots, k_scale, v_scale,
                                     norm_style, rope_style)  # fmt: skip


def _example(cache: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    scales = {name: torch.ones(1) for name in ("k_scale", "v_scale") if cache in FP8}
    return {"q": tensor_example(5, 7, 22), "k": tensor_example(5, 3, 22), "v": tensor_example(5, 3, 22),
            "cos": tensor_example(12), "sin": tensor_example(12), "k_cache": tensor_example(9, 16, 3, 22, dtype=cache),
            "v_cache": tensor_example(9, 16, 3, 22, dtype=cache), "slots": torch.zeros(5, dtype=torch.int64),
            **scales}  # fmt: skip


def _rope_example(cache: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    return {**_example(cache), "style": "neox"}


def _norm_example(cache: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    return {**_example(cache), "q_weight": tensor_example(22), "k_weight": tensor_example(22), "eps": 1e-6,
            "norm_style": "after", "rope_style": "neox"}  # fmt: skip


# A cache has both scales, or none.
_PLAIN = ("k", "v", "k_cache", "v_cache", "slots")
_SCALED = (*_PLAIN, "k_scale", "v_scale")


def _of_fp8(
    name: str, pattern: Callable[..., Any], replacement: Callable[..., Any], example: Callable[[torch.dtype], Any],
    **more: Any,
) -> Iterator[Rewrite]:  # fmt: skip
    for dtype in FP8:
        yield Rewrite(name, pattern, replacement, partial(example, dtype), variant=str(dtype), attrs={"scheme": "fp8"},
                      needs={"kv_write": {"given": _SCALED}}, **more)  # fmt: skip


_NEEDS_PLAIN = {"kv_write": {"given": _PLAIN}}
ROPE_KV_WRITE = [
    Rewrite("rope_kv_write", _rope_pattern, _rope_replacement, _rope_example, read_together=True, needs=_NEEDS_PLAIN),
    *_of_fp8("rope_kv_write", _scaled_rope_pattern, _scaled_rope_replacement, _rope_example, read_together=True),
]
QK_NORM_ROPE_KV_WRITE = [
    Rewrite("qk_norm_rope_kv_write", _norm_pattern, _norm_replacement, _norm_example, needs=_NEEDS_PLAIN),
    *_of_fp8("qk_norm_rope_kv_write", _scaled_norm_pattern, _scaled_norm_replacement, _norm_example),
]
