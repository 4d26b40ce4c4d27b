"""What is done to keys right before they are written to the cache joins the write.

    q > rope ---------------> paged_attention          q -+
    k > rope > kv_write ----> token              =>       rope_kv_write -+-> q, token
    v -------^                                      k, v -+

    qk_norm_rope -+-> q                                    q -+
                  +-> k > kv_write -> token      =>           qk_norm_rope_kv_write -+-> q, token
    v ------------------^                               k, v -+

A cache in fp8 has scales, which go to the write as they are: the op, and its kernels, round to what
the cache holds, so that a quantizing write is the same op at a site of scheme "fp8".
"""

from typing import Any

import torch
from torch import Tensor

from atomc import ops
from atomc.ops.formats import FP8
from atomc.rewriting.matching.captures import OneOf
from atomc.rewriting.rewrite import Case, Rewrite, tensor_example

# In all of these `cache` is what a write takes besides keys and values: both caches, slots, and
# both scales or none. mypy cannot count them, so the ops that take them have no signature here.
_ROPE_KV_WRITE: ops.Op = ops.rope_kv_write
_QK_NORM_ROPE_KV_WRITE: ops.Op = ops.qk_norm_rope_kv_write


def _rope_pattern(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, style: str, **cache: Tensor
) -> Any:
    token = ops.kv_write(ops.rope(k, cos, sin, style), v, *cache.values())
    return ops.rope(q, cos, sin, style), token


def _rope_replacement(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, style: str, **cache: Tensor
) -> Any:
    return _ROPE_KV_WRITE(q, k, v, cos, sin, *cache.values(), rope_style=style)


def _norm_pattern(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    eps: float,
    norm_style: str,
    rope_style: str,
    **cache: Tensor,
) -> Any:
    q, k = ops.qk_norm_rope(q, k, q_weight, k_weight, cos, sin, eps, norm_style, rope_style)
    return q, ops.kv_write(k, v, *cache.values())


def _norm_replacement(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    eps: float,
    norm_style: str,
    rope_style: str,
    **cache: Tensor,
) -> Any:
    return _QK_NORM_ROPE_KV_WRITE(
        q,
        k,
        v,
        q_weight,
        k_weight,
        cos,
        sin,
        eps,
        *cache.values(),
        norm_style=norm_style,
        rope_style=rope_style,
    )


def _example(cache: torch.dtype | OneOf, scales: tuple[str, ...] = ()) -> dict[str, Any]:
    return {
        "q": tensor_example(5, 7, 22),
        "k": tensor_example(5, 3, 22),
        "v": tensor_example(5, 3, 22),
        "cos": tensor_example(12),
        "sin": tensor_example(12),
        "k_cache": tensor_example(9, 16, 3, 22, dtype=cache),
        "v_cache": tensor_example(9, 16, 3, 22, dtype=cache),
        "slots": torch.zeros(5, dtype=torch.int64),
        **{name: torch.ones(1) for name in scales},
    }


def _rope_example(**cache: Any) -> dict[str, Any]:
    return {**_example(**cache), "style": "neox"}


def _norm_example(**cache: Any) -> dict[str, Any]:
    return {
        **_example(**cache),
        "q_weight": tensor_example(22),
        "k_weight": tensor_example(22),
        "eps": 1e-6,
        "norm_style": "after",
        "rope_style": "neox",
    }


def _attrs(**given: Any) -> dict[str, Any]:
    return {"scheme": "fp8"} if "k_scale" in given else {}


_SCALES = ("k_scale", "v_scale")
_WRITTEN = ("k", "v", "k_cache", "v_cache", "slots")
_CASES = [
    Case("", {"cache": torch.bfloat16}, {"kv_write": {"given": _WRITTEN}}),
    Case(
        "fp8",
        {"cache": OneOf(*FP8), "scales": _SCALES},
        {"kv_write": {"given": _WRITTEN + _SCALES}},
    ),
]
ROPE_KV_WRITE = Rewrite(
    "rope_kv_write",
    _rope_pattern,
    _rope_replacement,
    _rope_example,
    read_together=True,
    attrs=_attrs,
    cases=_CASES,
)
QK_NORM_ROPE_KV_WRITE = Rewrite(
    "qk_norm_rope_kv_write",
    _norm_pattern,
    _norm_replacement,
    _norm_example,
    attrs=_attrs,
    cases=_CASES,
)
