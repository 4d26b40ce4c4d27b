"""Rotary positions and the write into a shuffled cache in one Triton kernel of AITER's. Heads are a
power of two wide.
"""

from torch import Tensor

from atomc import ops
from atomc.kernels.aiter.attention.shuffled_cache import shuffled_views, unwritable
from atomc.kernels.aiter.library import Function, unfit
from atomc.kernels.aiter.rows.rope_kv_write import unrotatable_heads, written
from atomc.ops.op import Refusal
from atomc.platform import Platform

# Older versions write the values of such a cache token by token, [blocks, K, D, block_size]. They
# are known by an argument that they lack.
writes_values_in_pieces = Function(
    "fused_qk_rope_reshape_and_cache",
    "aiter.ops.triton.fusions.fused_kv_cache",
    takes=["upcast_operand"],
)


def _refuse(
    platform: Platform,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    rope_style: str,
) -> Refusal | None:
    return (
        unfit(platform, writes_values_in_pieces)
        or unrotatable_heads(
            platform, q, k, v, cos, sin, k_cache, v_cache, k_scale, v_scale, rope_style
        )
        or unwritable(k_cache, v_cache, slots)
    )


@ops.rope_kv_write.kernel("aiter", layout="shuffled", refuses=_refuse)
def rope_kv_write(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    rope_style: str,
) -> tuple[Tensor, Tensor]:
    caches = shuffled_views(k_cache, v_cache)
    return written(q, k, v, cos, sin, *caches, slots, rope_style, flash_layout=False)
