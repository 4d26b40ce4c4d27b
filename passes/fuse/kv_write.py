"""Fuse the norm and the rotation of keys with the write of keys and values into the cache.

    q > rope ---------------> paged_attention          q -+
    k > rope > kv_write ----> token              =>       rope_kv_write -+-> q, token
    v -------^                                      k, v -+

    qk_norm_rope -+-> q                                    q -+
                  +-> k > kv_write -> token      =>           qk_norm_rope_kv_write -+-> q, token
    v ------------------^                               k, v -+

An fp8 cache has scales, which are passed on unchanged: the op rounds to the dtype of the cache, so
the same op also quantizes. Such a site has scheme "fp8".
"""

import torch
from torch import Tensor

from atomc import ops
from atomc.ops.formats import FP8
from atomc.rewriting.example import Example, OneOf, tensor_example
from atomc.rewriting.rewrite import Case, Rewrite


# `cache` are the arguments of a write after keys and values: both caches, slots, and both scales or
# none.
def _rope_pattern(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    rope_style: str,
    in_fp32: bool,
    **cache: Tensor,
) -> tuple[Tensor, Tensor]:
    token = ops.kv_write(ops.rope(k, cos, sin, rope_style, in_fp32), v, *cache.values())
    return ops.rope(q, cos, sin, rope_style, in_fp32), token


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
) -> tuple[Tensor, Tensor]:
    q, k = ops.qk_norm_rope(q, k, q_weight, k_weight, cos, sin, eps, norm_style, rope_style)
    return q, ops.kv_write(k, v, *cache.values())


def _example(fp8: bool) -> Example:
    cache = OneOf(*FP8) if fp8 else torch.bfloat16
    return {
        "q": tensor_example(5, 7, 22),
        "k": tensor_example(5, 3, 22),
        "v": tensor_example(5, 3, 22),
        "cos": tensor_example(12),
        "sin": tensor_example(12),
        "k_cache": tensor_example(9, 16, 3, 22, dtype=cache),
        "v_cache": tensor_example(9, 16, 3, 22, dtype=cache),
        "slots": tensor_example(5, dtype=torch.int64),
        **({name: tensor_example(1, dtype=torch.float32) for name in _SCALES} if fp8 else {}),
    }


def _rope_example(fp8: bool) -> Example:
    table = OneOf(torch.bfloat16, torch.float32)
    tables = {name: tensor_example(12, dtype=table) for name in ("cos", "sin")}
    return {**_example(fp8), **tables, "rope_style": "neox", "in_fp32": OneOf(False, True)}


def _norm_example(fp8: bool) -> Example:
    return {
        **_example(fp8),
        "q_weight": tensor_example(22),
        "k_weight": tensor_example(22),
        "eps": 1e-6,
        "norm_style": "after",
        "rope_style": "neox",
    }


def _attrs(**arguments: object) -> dict[str, str]:
    return {"scheme": "fp8"} if "k_scale" in arguments else {}


_SCALES = ("k_scale", "v_scale")
_WRITTEN = ("k", "v", "k_cache", "v_cache", "slots")
_CASES = [
    Case("", {"fp8": False}, {"kv_write": {"given": _WRITTEN}}),
    Case("fp8", {"fp8": True}, {"kv_write": {"given": _WRITTEN + _SCALES}}),
]
ROPE_KV_WRITE = Rewrite(
    "rope_kv_write",
    _rope_pattern,
    ops.rope_kv_write,
    _rope_example,
    read_together=True,
    attrs=_attrs,
    cases=_CASES,
)
QK_NORM_ROPE_KV_WRITE = Rewrite(
    "qk_norm_rope_kv_write",
    _norm_pattern,
    ops.qk_norm_rope_kv_write,
    _norm_example,
    attrs=_attrs,
    cases=_CASES,
)
