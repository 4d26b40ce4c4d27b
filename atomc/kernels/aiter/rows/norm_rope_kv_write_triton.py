"""The norms of queries and keys, rotary positions and the write into a paged cache in one Triton
kernel of AITER's.

q, k and v are parts of one projection's rows. AITER multiplies by 1 + weight: it gets the weight
less one, in fp32.
"""

import torch
from torch import Tensor

from atomc import ops
from atomc.kernels.aiter.library import Function, installed
from atomc.kernels.aiter.rows.kv_write import odd_blocks, odd_heads, scaled, unpaged
from atomc.kernels.aiter.rows.norm_rope_kv_write import rows_of, share_rows
from atomc.kernels.aiter.rows.rope import moving, not_by_token
from atomc.kernels.checks import first_refusal, named, unlike
from atomc.ops.formats import HALVES
from atomc.ops.op import Prepared, Refusal

fused_qkv_split_qk_norm_rope_cache = Function(
    "fused_qkv_split_qk_norm_rope_cache",
    "aiter.ops.triton.rope.fused_qkv_split_qk_norm_rope_cache",
    takes=["reuse_freqs_front_part", "eps", "kv_cache_layout"],
)


def _less_one(weight: Tensor) -> Prepared:
    """The weight as AITER wants it of norms that multiply by it, and of those that multiply by 1 +
    weight.
    """
    return Prepared((weight.detach().to(torch.float32) - 1.0, weight.detach().clone()))


def _separate(q: Tensor, k: Tensor, v: Tensor) -> Refusal | None:
    if share_rows(q, k, v):
        return None
    return Refusal(
        "layout",
        "q, k and v do not follow each other in one row, as a merged projection leaves them",
    )


def _unlike_weights(
    q: Tensor, q_weight: Tensor, k_weight: Tensor, norm_style: str
) -> Refusal | None:
    if norm_style != "after":
        return None
    return unlike((q.dtype,), q_weight=q_weight, k_weight=k_weight)


@ops.qk_norm_rope_kv_write.kernel(
    "aiter",
    layout="paged",
    refuses=first_refusal(
        installed(fused_qkv_split_qk_norm_rope_cache),
        named("q k v cos sin k_cache v_cache", unlike, HALVES),
        _unlike_weights,
        named("k_scale v_scale", scaled),
        moving,
        odd_heads,
        _separate,
        not_by_token,
        lambda k_cache: odd_blocks(k_cache),
        unpaged,
    ),
    rounds="once",
    prepare={"q_weight": _less_one, "k_weight": _less_one},
)
def qk_norm_rope_kv_write(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_weight: tuple[Tensor, Tensor],
    k_weight: tuple[Tensor, Tensor],
    cos: Tensor,
    sin: Tensor,
    eps: float,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    norm_style: str,
    rope_style: str,
) -> tuple[Tensor, Tensor]:
    if not q.numel():
        return q.new_empty(q.shape), q.new_empty((0,))
    style = norm_style == "one_plus"
    positions = torch.arange(q.shape[0], device=q.device)  # token t has row t of the tables
    rotated, _, _ = fused_qkv_split_qk_norm_rope_cache(
        rows_of(q, k, v),
        q_weight[style],
        k_weight[style],
        cos.flatten(0, 1),
        sin.flatten(0, 1),
        positions,
        k_cache,
        v_cache,
        slots,
        q.shape[1],
        k.shape[1],
        q.shape[2],
        rope_style != "gptj",
        reuse_freqs_front_part=rope_style != "neox",
        eps=eps,
        kv_cache_layout="NHD",
    )
    return rotated, rotated.new_empty((0,))
