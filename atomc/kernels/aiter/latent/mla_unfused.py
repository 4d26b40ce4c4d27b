"""What AITER's fused kernels around latent attention refuse: a cache in fp8, by its rotation and
its write one after the other; queries that are multiplied by head in other sizes or dtypes, by its
product and the write with a rotation.
"""

from typing import Unpack

import torch
from torch import Tensor

from atomc import ops
from atomc.graph.sizes import known_equal
from atomc.kernels.aiter.latent.latent_cache import (
    unwritable_queries,
    unwritable_tokens,
    write_queries,
    write_tokens,
)
from atomc.kernels.aiter.latent.latent_rows import Operands, latent_rows
from atomc.kernels.aiter.library import Function, foreign_fp8, no_mxfp4, rounded_up, unfit
from atomc.kernels.aiter.rows.rope import refuse_rope, rope
from atomc.kernels.checks import odd_group
from atomc.kernels.row_views import with_lead
from atomc.ops.op import Refusal
from atomc.platform import Platform

_BATCHED = "batched_gemm_a8w8_a_per_token_group_prequant_w_per_batched_tensor_quant"
batched_gemm_a8w8 = Function(
    _BATCHED,
    f"aiter.ops.triton.gemm.batched.{_BATCHED}",
    f"aiter.ops.triton.{_BATCHED}",
    takes=["transpose_bm", "transpose_bm_in"],
)
batched_gemm_a16wfp4 = Function(
    "batched_gemm_a16wfp4",
    "aiter.ops.triton.gemm.batched.batched_gemm_a16wfp4",
    takes=["transpose_bm", "prequant"],
)


def _refuse_mla_rope_kv_write(
    platform: Platform,
    kv_cache: Tensor,
    slots: Tensor,
    scale: Tensor | None,
    **operands: Unpack[Operands],
) -> Refusal | None:
    rows = latent_rows(**operands)
    return unwritable_tokens(platform, rows.kv_c, rows.k_pe, kv_cache, slots, scale) or refuse_rope(
        platform, rows.q_pe, rows.cos, rows.sin, rows.style
    )


@ops.mla_rope_kv_write.kernel(
    "aiter", layout="paged", refuses=_refuse_mla_rope_kv_write, rounds="once"
)
def mla_rope_kv_write(
    kv_cache: Tensor, slots: Tensor, scale: Tensor | None, **operands: Unpack[Operands]
) -> tuple[Tensor, Tensor]:
    rows = latent_rows(**operands)
    q_rotated, k_rotated = (rope(x, rows.cos, rows.sin, rows.style) for x in (rows.q_pe, rows.k_pe))
    write_tokens(rows.kv_c, k_rotated, kv_cache, slots, scale)
    out = torch.cat((rows.q_nope, q_rotated), -1)
    return with_lead(out, operands["q_nope"]), rows.kv_c.new_empty((0,))


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
    if reason := unfit(platform, batched_gemm_a8w8 if scheme == "fp8" else batched_gemm_a16wfp4):
        return reason
    if scheme == "fp8":
        product = foreign_fp8(platform, weight.dtype, dtype) or odd_group(group)
    else:
        product = no_mxfp4(platform) or rounded_up(rounding)
    rows = latent_rows(**operands)
    if product:
        return product
    if not known_equal(weight.shape[1], rows.kv_c.shape[-1]):
        return Refusal("shape", "the weight does not lead to the latent space")
    return unwritable_queries(platform, rows, kv_cache, slots, scale)


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
    rows = latent_rows(**operands)
    latent = _multiplied(rows.q_nope, weight, weight_scale, scheme, group)
    out = write_queries(rows._replace(q_nope=latent), kv_cache, slots)
    return with_lead(out, operands["q_nope"]), out.new_empty((0,))


def _multiplied(x: Tensor, weight: Tensor, weight_scale: Tensor, scheme: str, group: int) -> Tensor:
    """x [T, H, P], quantized, times the weight of each head -> [T, H, L] in its dtype."""
    out: Tensor = x.new_empty((*x.shape[:-1], weight.shape[1]))
    if not x.numel():
        return out
    if scheme == "fp8":
        out = batched_gemm_a8w8(
            x, weight, weight_scale, group, dtype=x.dtype, transpose_bm=True, transpose_bm_in=True
        )
    else:
        out = batched_gemm_a16wfp4(
            x.transpose(0, 1), weight, weight_scale, x.dtype, out, transpose_bm=True, prequant=True
        )
    return out
