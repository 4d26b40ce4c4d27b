"""In the latent attention of DeepSeek, the rotation of queries and keys joins the write into the latent cache.

    q_nope -----------+                                q_nope, q_pe -+
    q_pe > rope > cat +--> q                                         mla_rope_kv_write -+-> q, token
    k_pe > rope -+                               =>     kv_c, k_pe --+
    kv_c --------+- mla_kv_write -> token
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from atomc import ops
from atomc.ops.formats import FP8
from atomc.rewrite import Rewrite, tensor_example


def _pattern(
    q_nope: Tensor, q_pe: Tensor, kv_c: Tensor, k_pe: Tensor, cos: Tensor, sin: Tensor, kv_cache: Tensor, slots: Tensor,
    style: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    q = torch.cat((q_nope, ops.rope(q_pe, cos, sin, style)), -1)
    return q, ops.mla_kv_write(kv_c, ops.rope(k_pe, cos, sin, style), kv_cache, slots)


def _replacement(
    q_nope: Tensor, q_pe: Tensor, kv_c: Tensor, k_pe: Tensor, cos: Tensor, sin: Tensor, kv_cache: Tensor, slots: Tensor,
    style: str,
) -> Any:  # fmt: skip
    return ops.mla_rope_kv_write(q_nope, q_pe, kv_c, k_pe, cos, sin, kv_cache, slots, rope_style=style)


def _scaled_pattern(
    q_nope: Tensor, q_pe: Tensor, kv_c: Tensor, k_pe: Tensor, cos: Tensor, sin: Tensor, kv_cache: Tensor, slots: Tensor,
    scale: Tensor, style: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    q = torch.cat((q_nope, ops.rope(q_pe, cos, sin, style)), -1)
    return q, ops.mla_kv_write(kv_c, ops.rope(k_pe, cos, sin, style), kv_cache, slots, scale)


def _scaled_replacement(
    q_nope: Tensor, q_pe: Tensor, kv_c: Tensor, k_pe: Tensor, cos: Tensor, sin: Tensor, kv_cache: Tensor, slots: Tensor,
    scale: Tensor, style: str,
) -> Any:  # fmt: skip
    return ops.mla_rope_kv_write(q_nope, q_pe, kv_c, k_pe, cos, sin, kv_cache, slots, scale, style)


def example(cache: torch.dtype) -> dict[str, Any]:
    """For a pattern that ends in a write into a latent cache."""
    scales = {"scale": torch.ones(1)} if cache in FP8 else {}
    return {"q_nope": tensor_example(5, 7, 22), "q_pe": tensor_example(5, 7, 12), "kv_c": tensor_example(5, 22),
            "k_pe": tensor_example(5, 1, 12), "cos": tensor_example(6), "sin": tensor_example(6),
            "kv_cache": tensor_example(9, 16, 34, dtype=cache), "slots": torch.zeros(5, dtype=torch.int64), **scales,
            "style": "half"}  # fmt: skip


# A cache in fp8 has a scale.
PLAIN = ("kv_c", "k_pe", "kv_cache", "slots")
MLA_ROPE_KV_WRITE = [
    Rewrite("mla_rope_kv_write", _pattern, _replacement, lambda: example(torch.bfloat16), read_together=True,
            needs={"mla_kv_write": {"given": PLAIN}}),
    *(Rewrite("mla_rope_kv_write", _scaled_pattern, _scaled_replacement, partial(example, dtype), variant=str(dtype),
              attrs={"scheme": "fp8"}, read_together=True, needs={"mla_kv_write": {"given": (*PLAIN, "scale")}})
      for dtype in FP8),
]  # fmt: skip
