"""Rotary positions and the write into a shuffled cache in one Triton kernel of AITER's. Heads are a
power of two wide.
"""

from torch import Tensor

from atomc import ops
from atomc.kernels.aiter.attention.shuffled_cache import shuffled_views, unwritable
from atomc.kernels.aiter.library import Function, installed
from atomc.kernels.aiter.rows.rope_kv_write import unrotatable_heads, written
from atomc.kernels.checks import first_refusal

# Older versions write the values of such a cache token by token, [blocks, K, D, block_size]. They
# are known by an argument that they lack.
writes_values_in_pieces = Function(
    "fused_qk_rope_reshape_and_cache",
    "aiter.ops.triton.fusions.fused_kv_cache",
    takes=["upcast_operand"],
)


@ops.rope_kv_write.kernel(
    "aiter",
    layout="shuffled",
    refuses=first_refusal(installed(writes_values_in_pieces), unrotatable_heads, unwritable),
)
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
