"""Rotary positions and the write into a paged cache in one Triton kernel of AITER's. Heads are a
power of two wide.
"""

import torch
from torch import Tensor

from atomc import ops
from atomc.kernels.aiter.library import Function, installed
from atomc.kernels.aiter.rows.kv_write import coded, odd_blocks, odd_heads, unpaged
from atomc.kernels.aiter.rows.rope import empty_rotated, moving, not_by_token, partly_rotated
from atomc.kernels.checks import first_refusal, named, unlike, unsupported
from atomc.ops.formats import HALVES

fused_qk_rope_reshape_and_cache = Function(
    "fused_qk_rope_reshape_and_cache",
    "aiter.ops.triton.fusions.fused_kv_cache",
    "aiter.ops.triton.fused_kv_cache",
    takes=["apply_scale", "q_out", "output_zeros"],
)


# Why `written` does not serve these, whatever the layout of the caches.
unrotatable_heads = first_refusal(
    installed(fused_qk_rope_reshape_and_cache),
    named("q k cos sin", unlike, HALVES),
    lambda k_scale, v_scale, k_cache, v_cache: coded(
        k_scale, v_scale, k_cache=k_cache, v_cache=v_cache
    ),
    moving,
    odd_heads,
    lambda q, cos, rope_style: partly_rotated(q.shape[-1], cos, rope_style),
    not_by_token,
    lambda k_cache: odd_blocks(k_cache),
    lambda in_fp32: unsupported("AITER's kernel", in_fp32=in_fp32),
)


@ops.rope_kv_write.kernel(
    "aiter", layout="paged", refuses=first_refusal(unrotatable_heads, unpaged)
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
    return written(q, k, v, cos, sin, k_cache, v_cache, slots, rope_style, flash_layout=True)


def written(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    rope_style: str,
    *,
    flash_layout: bool,
) -> tuple[Tensor, Tensor]:
    """rope_kv_write into caches [blocks, block_size, K, D] (flash_layout) or shuffled_views."""
    out = empty_rotated(q, cos, rope_style)
    if q.numel():
        rows = torch.arange(q.shape[0], device=q.device)  # token t has row t of the tables
        fused_qk_rope_reshape_and_cache(
            q,
            k,
            v,
            k_cache,
            v_cache,
            slots,
            rows,
            cos.flatten(0, 1),
            sin.flatten(0, 1),
            None,
            None,
            rope_style != "gptj",
            flash_layout,
            apply_scale=False,
            q_out=out,
            output_zeros=False,
        )
    return out, out.new_empty((0,))
