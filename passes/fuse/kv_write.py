"""What is done to keys right before they are written to the cache joins the write.

    q > rope ---------------> paged_attention          q -+
    k > rope > kv_write ----> token              =>       rope_kv_write -+-> q, token
    v -------^                                      k, v -+

    qk_norm_rope -+-> q                                    q -+
                  +-> k > kv_write -> token      =>           qk_norm_rope_kv_write -+-> q, token
    v ------------------^                               k, v -+
"""

from typing import Any

import torch
from torch import Tensor

from atomc import ops
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


def _example() -> dict[str, Any]:
    return {"q": tensor_example(5, 7, 22), "k": tensor_example(5, 3, 22), "v": tensor_example(5, 3, 22),
            "cos": tensor_example(12), "sin": tensor_example(12), "k_cache": tensor_example(9, 16, 3, 22),
            "v_cache": tensor_example(9, 16, 3, 22), "slots": torch.zeros(5, dtype=torch.int64)}  # fmt: skip


def _norm_example() -> dict[str, Any]:
    return {**_example(), "q_weight": tensor_example(22), "k_weight": tensor_example(22), "eps": 1e-6,
            "norm_style": "after", "rope_style": "neox"}  # fmt: skip


ROPE_KV_WRITE = [Rewrite("rope_kv_write", _rope_pattern, _rope_replacement, lambda: {**_example(), "style": "neox"},
                         read_together=True)]  # fmt: skip
QK_NORM_ROPE_KV_WRITE = [Rewrite("qk_norm_rope_kv_write", _norm_pattern, _norm_replacement, _norm_example)]
