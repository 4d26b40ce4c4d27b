"""Rotary positions and the write into a paged cache in one Triton kernel of AITER's. Heads are a power of two wide."""

import torch
from torch import Tensor

from atomc import ops
from atomc.graph.sizes import known_equal
from atomc.kernels.aiter.kv_write import odd_blocks, unpaged
from atomc.kernels.aiter.library import HALVES, Function, unfit, unlike
from atomc.kernels.aiter.rope import ROTATIONS, empty_rotated, rotated_width, table_dimension
from atomc.op import Refusal
from atomc.platform import Platform

fused_qk_rope_reshape_and_cache = Function(
    "fused_qk_rope_reshape_and_cache", "aiter.ops.triton.fusions.fused_kv_cache", "aiter.ops.triton.fused_kv_cache",
    takes=["apply_scale", "q_out", "output_zeros"],
)  # fmt: skip


def _refuse(
    platform: Platform, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor,
    slots: Tensor, k_scale: Tensor | None = None, v_scale: Tensor | None = None, rope_style: str = "neox",
) -> Refusal | None:  # fmt: skip
    if reason := unfit(platform, fused_qk_rope_reshape_and_cache):
        return reason
    if reason := unlike(HALVES, q=q, k=k, v=v, cos=cos, sin=sin):
        return reason
    if k_scale is not None or v_scale is not None or k_cache.dtype != torch.bfloat16 or v_cache.dtype != torch.bfloat16:
        return Refusal(
            "dtype", "the cache is not bfloat16: AITER does not cut off what is too large for codes, and has no other"
        )
    if rope_style not in ROTATIONS:
        return Refusal("argument", f"AITER writes a pair back where it was, rope_style={rope_style!r} moves it")
    width = q.shape[-1]
    if q.dim() != 3 or k.dim() != 3 or v.dim() != 3:
        return Refusal("shape", "queries, keys and values come as [T, heads, D]")
    if not width == k.shape[-1] == v.shape[-1] or width & (width - 1):
        return Refusal("shape", f"heads of {width}, {k.shape[-1]} and {v.shape[-1]}: AITER takes one power of two")
    if rotated_width(cos, rope_style) != width:
        return Refusal("shape", f"{rotated_width(cos, rope_style)} of {width} columns rotate: AITER's kernel rotates all")
    if table_dimension(q, cos) != 0 or table_dimension(q, sin) != 0:
        return Refusal("shape", "the tables do not have a row for each token")
    if not all(known_equal(a, b) for a, b in zip(cos.stride(), sin.stride(), strict=True)):
        return Refusal("layout", "the tables of cos and sin lie differently")
    return odd_blocks(k_cache) or unpaged(k_cache, v_cache, slots)


@ops.rope_kv_write.kernel("aiter", layout="paged", refuses=_refuse)
def rope_kv_write(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor,
    k_scale: Tensor | None = None, v_scale: Tensor | None = None, rope_style: str = "neox",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    out = empty_rotated(q, cos, rope_style)
    if q.numel():
        rows = torch.arange(q.shape[0], device=q.device)  # token t has row t of the tables
        fused_qk_rope_reshape_and_cache(
            q, k, v, k_cache, v_cache, slots, rows, cos.flatten(0, 1), sin.flatten(0, 1), None, None,
            rope_style != "gptj", True, apply_scale=False, q_out=out, output_zeros=False,
        )  # fmt: skip
    return out, out.new_empty((0,))
