"""The norms of queries and keys, rotary positions and the write into a shuffled cache in one HIP
kernel of AITER's.
"""

from torch import Tensor

from atomc import ops
from atomc.kernels.aiter.attention.shuffled_cache import unwritable as unwritable_cache
from atomc.kernels.aiter.rows.norm_rope_kv_write import TABLES, unwritable, written
from atomc.kernels.checks import first_refusal


@ops.qk_norm_rope_kv_write.kernel(
    "aiter",
    layout="shuffled",
    refuses=first_refusal(unwritable, unwritable_cache),
    rounds="once",
    shared=TABLES,
)
def qk_norm_rope_kv_write(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    eps: float,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    shared: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor]:
    cache = k_cache, v_cache, slots, k_scale, v_scale
    return written(q, k, v, q_weight, k_weight, eps, *cache, *shared, shuffled=True)
