"""Writes into caches without scales on a CPU, for both layouts; in the contiguous one a block is a
sequence.
"""

from torch import Tensor

from atomc import ops
from atomc.kernels.torch.sequence import refuse_scaled_cache, write


@ops.kv_write.kernel("torch", layout="contiguous", refuses=refuse_scaled_cache)
@ops.kv_write.kernel(
    "torch", layout="paged", refuses=refuse_scaled_cache
)  # registered first, and therefore preferred
def kv_write(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> Tensor:
    return write(k, v, k_cache, v_cache, slots)


@ops.rope_kv_write.kernel("torch", layout="contiguous", refuses=refuse_scaled_cache)
@ops.rope_kv_write.kernel(
    "torch", layout="paged", refuses=refuse_scaled_cache
)  # registered first, and therefore preferred
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
    in_fp32: bool,
) -> tuple[Tensor, Tensor]:
    q, k = (ops.rope.reference(x, cos, sin, rope_style, in_fp32) for x in (q, k))
    return q, write(k, v, k_cache, v_cache, slots)


@ops.qk_norm_rope_kv_write.kernel("torch", layout="contiguous", refuses=refuse_scaled_cache)
@ops.qk_norm_rope_kv_write.kernel(
    "torch", layout="paged", refuses=refuse_scaled_cache
)  # registered first, and therefore preferred
def qk_norm_rope_kv_write(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    norm_style: str,
    rope_style: str,
) -> tuple[Tensor, Tensor]:
    q, k = ops.qk_norm_rope.reference(
        q, k, q_weight, k_weight, cos, sin, eps, norm_style, rope_style
    )
    return q, write(k, v, k_cache, v_cache, slots)
