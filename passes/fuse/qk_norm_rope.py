"""Fuse the norms and the rotations of queries and keys; a pair is one site.

q > rms_norm > rope -+                 q -+
                     +- attention  =>     qk_norm_rope -+- attention
k > rms_norm > rope -+                 k -+
"""

from torch import Tensor

from atomc import ops
from atomc.rewriting.example import Example, tensor_example
from atomc.rewriting.rewrite import Rewrite


def _pattern(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    norm_style: str,
    rope_style: str,
) -> tuple[Tensor, Tensor]:
    return (
        ops.rope(ops.rms_norm(q, q_weight, eps, norm_style), cos, sin, rope_style),
        ops.rope(ops.rms_norm(k, k_weight, eps, norm_style), cos, sin, rope_style),
    )


def _example() -> Example:
    return {
        "q": tensor_example(5, 7, 22),
        "k": tensor_example(5, 3, 22),
        "q_weight": tensor_example(22),
        "k_weight": tensor_example(22),
        "cos": tensor_example(12),
        "sin": tensor_example(12),
        "eps": 1e-6,
        "norm_style": "after",
        "rope_style": "neox",
    }


QK_NORM_ROPE = Rewrite("qk_norm_rope", _pattern, ops.qk_norm_rope, _example, read_together=True)
