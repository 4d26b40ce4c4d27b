"""Fuse the rotation of queries and keys with the write into the latent cache (DeepSeek's latent
attention).

q_nope -----------+                                q_nope, q_pe -+
q_pe > rope > cat +--> q                                         mla_rope_kv_write -+-> q, token
k_pe > rope -+                               =>     kv_c, k_pe --+
kv_c --------+- mla_kv_write -> token
"""

import torch
from torch import Tensor

from atomc import ops
from atomc.ops.formats import FP8
from atomc.rewriting.example import Example, OneOf, tensor_example
from atomc.rewriting.rewrite import Case, Rewrite


# `cache` are the arguments of the write after the keys: the cache, slots, and a scale or none.
def _pattern(
    q_nope: Tensor,
    q_pe: Tensor,
    kv_c: Tensor,
    k_pe: Tensor,
    cos: Tensor,
    sin: Tensor,
    rope_style: str,
    **cache: Tensor,
) -> tuple[Tensor, Tensor]:
    q = torch.cat((q_nope, ops.rope(q_pe, cos, sin, rope_style)), -1)
    return q, ops.mla_kv_write(kv_c, ops.rope(k_pe, cos, sin, rope_style), *cache.values())


def example(scaled: bool) -> Example:
    """For a pattern that ends in a write into a latent cache; an fp8 cache has a scale."""
    cache = tensor_example(9, 16, 34, dtype=OneOf(*FP8) if scaled else torch.bfloat16)
    return {
        "q_nope": tensor_example(5, 7, 26),
        "q_pe": tensor_example(5, 7, 12),
        "kv_c": tensor_example(5, 22),
        "k_pe": tensor_example(5, 1, 12),
        "cos": tensor_example(6),
        "sin": tensor_example(6),
        "kv_cache": cache,
        "slots": tensor_example(5, dtype=torch.int64),
        **({"scale": tensor_example(1, dtype=torch.float32)} if scaled else {}),
        "rope_style": "half",
    }


def _attrs(**arguments: object) -> dict[str, str]:
    return {"scheme": "fp8"} if "scale" in arguments else {}


_WRITTEN = ("kv_c", "k_pe", "kv_cache", "slots")
MLA_ROPE_KV_WRITE = Rewrite(
    "mla_rope_kv_write",
    _pattern,
    ops.mla_rope_kv_write,
    example,
    attrs=_attrs,
    read_together=True,
    cases=[
        Case("", {"scaled": False}, {"mla_kv_write": {"given": _WRITTEN}}),
        Case("fp8", {"scaled": True}, {"mla_kv_write": {"given": (*_WRITTEN, "scale")}}),
    ],
)
