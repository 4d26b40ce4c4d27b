"""Norms, rotary positions and the write into a shuffled cache by AITER's compiled kernels, one
after another, for what has no fused kernel.
"""

from torch import Tensor

from atomc import ops
from atomc.kernels.aiter.attention.shuffled_kv_write import kv_write, refuse_kv_write
from atomc.kernels.aiter.library import unfit
from atomc.kernels.aiter.rows.kv_write import apart
from atomc.kernels.aiter.rows.norm import refuse_rms_norm, rms_norm
from atomc.kernels.aiter.rows.rope import refuse_rope, rope
from atomc.ops.by_name import call_by_name
from atomc.ops.op import Refusal
from atomc.platform import Platform


def _refuse_rope_kv_write(
    platform: Platform,
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    rope_style: str,
    **arguments: object,
) -> Refusal | None:
    return (
        refuse_rope(platform, q, cos, sin, rope_style)
        or refuse_rope(platform, k, cos, sin, rope_style)
        or refuse_kv_write(platform, **{**arguments, "k": k.contiguous()})
    )


@ops.rope_kv_write.kernel(
    "aiter", layout="shuffled", launches=3, refuses=_refuse_rope_kv_write, rounds="once"
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
    rotated = rope(k, cos, sin, rope_style).contiguous()
    token = kv_write(rotated, v, k_cache, v_cache, slots)
    return rope(q, cos, sin, rope_style), token


def _refuse_qk_norm_rope_kv_write(
    platform: Platform,
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    norm_style: str,
    **arguments: object,
) -> Refusal | None:
    # Before tensors are computed for each node. The result is contiguous, and is to lie as q does.
    if reason := unfit(platform) or apart(q=q):
        return reason
    # Norms give contiguous rows.
    q, k = q.contiguous(), k.contiguous()
    return (
        refuse_rms_norm(platform, q, q_weight, norm_style)
        or refuse_rms_norm(platform, k, k_weight, norm_style)
        or call_by_name(_refuse_rope_kv_write, platform=platform, q=q, k=k, **arguments)
    )


@ops.qk_norm_rope_kv_write.kernel(
    "aiter", layout="shuffled", launches=5, refuses=_refuse_qk_norm_rope_kv_write, rounds="once"
)
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
    q = rms_norm(q, q_weight, eps, norm_style)
    k = rms_norm(k, k_weight, eps, norm_style)
    return rope_kv_write(q, k, v, cos, sin, k_cache, v_cache, slots, rope_style=rope_style)
