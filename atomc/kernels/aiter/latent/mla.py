"""What stands around latent attention, by AITER's Triton kernels: rotary positions and the write,
behind a product by head in fp8 or MXFP4 where the op has one. The latent is a power of two wide.
"""

from typing import Unpack

import torch
from torch import Tensor

from atomc import ops
from atomc.kernels.aiter.latent.latent_rows import (
    LatentRows,
    Operands,
    latent_rows,
    outside_of_latents,
)
from atomc.kernels.aiter.library import Function, foreign_fp8, no_mxfp4, rounded_up, unfit
from atomc.kernels.aiter.rows.kv_write import coded
from atomc.kernels.aiter.rows.rope import moving, not_by_token, partly_rotated
from atomc.kernels.checks import (
    odd_group,
    scattered_blocks,
    scattered_slots,
    strided,
    unlike,
)
from atomc.kernels.row_views import with_lead
from atomc.ops.formats import HALVES
from atomc.ops.op import Refusal
from atomc.platform import Platform

fused_qk_rope_cat_and_cache_mla = Function(
    "fused_qk_rope_cat_and_cache_mla",
    "aiter.ops.triton.fusions.fused_kv_cache",
    "aiter.ops.triton.fused_kv_cache",
    takes=["apply_scale", "q_out"],
)
BMM = "aiter.ops.triton.fusions.fused_bmm_rope_kv_cache"
fused_fp8_bmm_rope_cat_and_cache_mla = Function(
    "fused_fp8_bmm_rope_cat_and_cache_mla", BMM, takes=["group_size", "is_neox", "q_out_dtype"]
)
fused_fp4_bmm_rope_cat_and_cache_mla = Function(
    "fused_fp4_bmm_rope_cat_and_cache_mla", BMM, takes=["is_neox", "q_out_dtype"]
)


def _unwritable(
    rows: LatentRows, kv_cache: Tensor, slots: Tensor, scale: Tensor | None
) -> Refusal | None:
    q_nope, q_pe, kv_c, _, cos, sin, style = rows
    return (
        unlike(HALVES, q_nope=q_nope, q_pe=q_pe, kv_c=kv_c, cos=cos, sin=sin)
        or coded(scale, kv_cache=kv_cache)
        or moving(style)
        or _odd_widths(kv_c.shape[-1], q_pe.shape[-1])
        or partly_rotated(q_pe.shape[-1], cos, style)
        or not_by_token(q_pe, cos, sin)
        or scattered_blocks(kv_cache)
        or strided(kv_cache=kv_cache)
        or scattered_slots(slots)
    )


def _odd_widths(latent: int, rotated: int) -> Refusal | None:
    if latent & (latent - 1) or rotated & (rotated - 1):
        return Refusal(
            "shape",
            f"a latent of {latent} and {rotated} rotated columns: AITER takes powers of two",
        )
    return None


def _refuse_mla_rope_kv_write(
    platform: Platform,
    kv_cache: Tensor,
    slots: Tensor,
    scale: Tensor | None,
    **operands: Unpack[Operands],
) -> Refusal | None:
    if reason := unfit(platform, fused_qk_rope_cat_and_cache_mla):
        return reason
    rows = latent_rows(**operands)
    return _unwritable(rows, kv_cache, slots, scale) or outside_of_latents(rows.q_nope, rows.kv_c)


@ops.mla_rope_kv_write.kernel("aiter", layout="paged", refuses=_refuse_mla_rope_kv_write)
def mla_rope_kv_write(
    kv_cache: Tensor, slots: Tensor, **operands: Unpack[Operands]
) -> tuple[Tensor, Tensor]:
    rows = latent_rows(**operands)
    width = rows.q_nope.shape[-1] + rows.q_pe.shape[-1]
    out = rows.q_nope.new_empty((*rows.q_nope.shape[:-1], width))
    if out.numel():
        fused_qk_rope_cat_and_cache_mla(
            rows.q_nope,
            rows.q_pe,
            *_written(rows, kv_cache, slots),
            None,
            rows.style != "gptj",
            apply_scale=False,
            q_out=out,
        )
    return with_lead(out, operands["q_nope"]), out.new_empty((0,))


def _written(rows: LatentRows, kv_cache: Tensor, slots: Tensor) -> tuple[Tensor, ...]:
    """The arguments from the latent to the tables."""
    return (
        rows.kv_c.unsqueeze(1),
        rows.k_pe,
        kv_cache.flatten(0, 1).unsqueeze(1),  # a page for each token
        slots,
        # Token t has row t of the tables.
        torch.arange(rows.kv_c.shape[0], device=kv_cache.device),
        rows.cos.flatten(0, 1),
        rows.sin.flatten(0, 1),
    )


def _refuse_bmm_rope_kv_write(
    platform: Platform,
    weight: Tensor,
    kv_cache: Tensor,
    slots: Tensor,
    scale: Tensor | None,
    scheme: str,
    group: int,
    dtype: torch.dtype,
    rounding: str,
    **operands: Unpack[Operands],
) -> Refusal | None:
    function = (
        fused_fp8_bmm_rope_cat_and_cache_mla
        if scheme == "fp8"
        else fused_fp4_bmm_rope_cat_and_cache_mla
    )
    if reason := unfit(platform, function):
        return reason
    if scheme == "fp8" and (reason := foreign_fp8(platform, weight.dtype, dtype)):
        return reason
    product = odd_group(group) if scheme == "fp8" else rounded_up(rounding) or no_mxfp4(platform)
    return product or _unwritable(latent_rows(**operands), kv_cache, slots, scale)


@ops.bmm_rope_kv_write.kernel(
    "aiter", layout="paged", refuses=_refuse_bmm_rope_kv_write, rounds="once"
)
def bmm_rope_kv_write(
    weight: Tensor,
    weight_scale: Tensor,
    kv_cache: Tensor,
    slots: Tensor,
    scheme: str,
    group: int,
    **operands: Unpack[Operands],
) -> tuple[Tensor, Tensor]:
    rows, q_nope = latent_rows(**operands), operands["q_nope"]
    shape = (*q_nope.shape[:-1], weight.shape[1] + rows.q_pe.shape[-1])
    token = rows.kv_c.new_empty((0,))
    if not q_nope.numel():
        return q_nope.new_empty(shape), token
    products = (
        rows.q_nope.transpose(0, 1),
        weight,
        weight_scale,
        rows.q_pe,
        *_written(rows, kv_cache, slots),
    )
    how = {"is_neox": rows.style != "gptj", "q_out_dtype": q_nope.dtype}
    if scheme == "fp8":
        out = fused_fp8_bmm_rope_cat_and_cache_mla(*products, group_size=group, **how)[0]
    else:
        out = fused_fp4_bmm_rope_cat_and_cache_mla(*products, **how)[0]
    return out.view(shape), token
