"""What AITER's fused kernels around latent attention refuse, such as a cache in fp8: by its product
by head, its rotation and its write one after the other.
"""

from typing import Unpack

import torch
from torch import Tensor

from atomc import ops
from atomc.kernels.aiter.latent.head_product import quantized_linear_by_head, refuse_product
from atomc.kernels.aiter.latent.latent_cache import unwritable_tokens, write_tokens
from atomc.kernels.aiter.latent.latent_rows import Operands, latent_rows
from atomc.kernels.aiter.library import unfit
from atomc.kernels.aiter.rows.rope import refuse_rope, rope
from atomc.kernels.row_views import with_lead
from atomc.ops.op import Refusal
from atomc.platform import Platform


def _refuse_mla_rope_kv_write(
    platform: Platform,
    kv_cache: Tensor,
    slots: Tensor,
    scale: Tensor | None,
    **operands: Unpack[Operands],
) -> Refusal | None:
    if reason := unfit(platform):  # before tensors are computed for each node
        return reason
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
    q_nope = operands["q_nope"]
    return refuse_product(
        platform, q_nope, weight, scheme, group, dtype, rounding
    ) or _refuse_mla_rope_kv_write(platform, kv_cache, slots, scale, **operands)


@ops.bmm_rope_kv_write.kernel(
    "aiter", layout="paged", refuses=_refuse_bmm_rope_kv_write, rounds="once"
)
def bmm_rope_kv_write(
    weight: Tensor,
    weight_scale: Tensor,
    kv_cache: Tensor,
    slots: Tensor,
    scale: Tensor | None,
    scheme: str,
    group: int,
    **operands: Unpack[Operands],
) -> tuple[Tensor, Tensor]:
    operands["q_nope"] = quantized_linear_by_head(
        operands["q_nope"], weight, weight_scale, scheme=scheme, group=group
    )
    return mla_rope_kv_write(kv_cache=kv_cache, slots=slots, scale=scale, **operands)
