"""Writes into a latent cache by AITER's HIP kernels, alone and with the rotation of queries and
keys.

AITER calls a cache [pages, page_size, L + R] whose rows are the latent and then the rotated key;
ours is that in layout `paged`. Its segmented pages (all latents of a page, then all keys) are
another layout, which no kernel of atomc calls.
"""

from typing import Unpack

import torch
from torch import Tensor

from atomc import ops
from atomc.kernels.aiter.latent.latent_rows import (
    Operands,
    latent_rows,
    outside_of_latents,
    unbatched,
)
from atomc.kernels.aiter.library import FP8_OF, Function, unfit
from atomc.kernels.aiter.rows.rope import moving, not_by_token, partly_rotated
from atomc.kernels.checks import (
    scattered_slots,
    strided,
    uneven,
    unlike,
    unsupported,
    wrong_rank,
)
from atomc.kernels.row_views import as_rows, with_lead
from atomc.ops.formats import HALVES
from atomc.ops.op import Refusal
from atomc.platform import Platform

concat_and_cache_mla = Function("concat_and_cache_mla", "aiter")
fused_qk_rope_concat_and_cache_mla = Function(
    "fused_qk_rope_concat_and_cache_mla", "aiter", takes=["compute_all_q_rope"]
)
# Columns that a thread of its kernels moves at once; a token has a thread for each of these in a
# latent of at most so many columns.
VECTOR = 8
WIDEST = 1024
# DeepSeek's widths, and the least product of latent and heads: its kernel for other sizes does not
# write the queries of tokens without a slot.
LATENT, ROTATED, LEAST = 512, 64, 2048


def unwritable_tokens(
    platform: Platform,
    kv_c: Tensor,
    k_pe: Tensor,
    kv_cache: Tensor,
    slots: Tensor,
    scale: Tensor | None,
) -> Refusal | None:
    """Why `write_tokens` does not serve these."""
    return (
        unfit(platform, concat_and_cache_mla)
        or unlike(HALVES, kv_c=kv_c, k_pe=k_pe)
        or _uncached(platform, kv_c, kv_cache, scale)
        or wrong_rank((2,), kv_c=kv_c)
        or uneven(kv_c.shape[-1], VECTOR)
        or uneven(k_pe.shape[-1], VECTOR)
        or _wide_key(kv_c.shape[-1], k_pe.shape[-1])
        or strided(kv_c=kv_c, k_pe=k_pe, kv_cache=kv_cache)
        or _off_vectors(kv_c=kv_c, k_pe=k_pe)
        or scattered_slots(slots)
    )


def _uncached(
    platform: Platform, kv_c: Tensor, kv_cache: Tensor, scale: Tensor | None
) -> Refusal | None:
    native = FP8_OF[platform.arch]
    if kv_cache.dtype == native and scale is not None:
        return None
    if kv_cache.dtype == kv_c.dtype:
        return unsupported("AITER's write in 16 bits", scale=scale)
    return Refusal(
        "dtype",
        f"the cache is {kv_cache.dtype}: AITER writes {kv_c.dtype}, or {native} with a scale",
    )


def _wide_key(latent: int, rotated: int) -> Refusal | None:
    if rotated <= min(latent, WIDEST):
        return None
    return Refusal(
        "shape",
        f"{latent} + {rotated} columns: AITER's threads are those of a latent of up to {WIDEST} "
        "columns, which is at least as wide as the key",
    )


def _off_vectors(**tensors: Tensor) -> Refusal | None:
    """Unless each row starts at a whole vector from the first."""
    for name, x in tensors.items():
        if any(isinstance(stride, int) and stride % VECTOR for stride in x.stride()[:-1]):
            return Refusal(
                "layout", f"the rows of {name} are not a multiple of {VECTOR} elements apart"
            )
    return None


def write_tokens(
    kv_c: Tensor, k_pe: Tensor, kv_cache: Tensor, slots: Tensor, scale: Tensor | None
) -> None:
    """kv_c [T, L] and k_pe [T, 1, R] to slots of the cache."""
    if not kv_c.numel():
        return
    # Read by the kernel also where it scales nothing.
    factor = kv_c.new_ones(1, dtype=torch.float32) if scale is None else scale
    kind = "auto" if scale is None else "fp8"
    concat_and_cache_mla(kv_c, k_pe.squeeze(-2), kv_cache, slots, kind, factor)


def _refuse_mla_kv_write(
    platform: Platform,
    kv_c: Tensor,
    k_pe: Tensor,
    kv_cache: Tensor,
    slots: Tensor,
    scale: Tensor | None,
) -> Refusal | None:
    # Before tensors are computed for each node.
    return unfit(platform) or unwritable_tokens(
        platform, unbatched(kv_c, 2), unbatched(k_pe, 3), kv_cache, slots, scale
    )


@ops.mla_kv_write.kernel("aiter", layout="paged", refuses=_refuse_mla_kv_write)
def mla_kv_write(
    kv_c: Tensor, k_pe: Tensor, kv_cache: Tensor, slots: Tensor, scale: Tensor | None
) -> Tensor:
    write_tokens(unbatched(kv_c, 2), unbatched(k_pe, 3), kv_cache, slots, scale)
    return kv_c.new_empty((0,))


def _other_widths(latent: int, rotated: int, heads: int) -> Refusal | None:
    if (latent, rotated) == (LATENT, ROTATED) and latent * heads >= LEAST:
        return None
    return Refusal(
        "shape",
        f"{heads} heads over {latent} + {rotated} columns: with others than {LEAST // LATENT} "
        f"heads and more over {LATENT} + {ROTATED}, AITER leaves queries without a slot unwritten",
    )


def _two_angles(rope_style: str) -> Refusal | None:
    if rope_style != "neox":
        return None
    return Refusal("argument", "the tables have two angles a pair, AITER's kernel reads one")


def _refuse_mla_rope_kv_write(
    platform: Platform,
    kv_cache: Tensor,
    slots: Tensor,
    scale: Tensor | None,
    **operands: Unpack[Operands],
) -> Refusal | None:
    if reason := unfit(platform, fused_qk_rope_concat_and_cache_mla):
        return reason
    q_nope, q_pe, kv_c, k_pe, cos, sin, style = latent_rows(**operands)
    return (
        unsupported("AITER's write, which does not saturate rotated codes,", scale=scale)
        or unlike(
            HALVES,
            q_nope=q_nope,
            q_pe=q_pe,
            kv_c=kv_c,
            k_pe=k_pe,
            cos=cos,
            sin=sin,
            kv_cache=kv_cache,
        )
        or moving(style)
        or _other_widths(kv_c.shape[-1], q_pe.shape[-1], q_pe.shape[-2])
        or partly_rotated(q_pe.shape[-1], cos, style)
        or _two_angles(style)
        or not_by_token(q_pe, cos, sin)
        or outside_of_latents(q_nope, kv_c)
        or strided(q_nope=q_nope, q_pe=q_pe, kv_c=kv_c, k_pe=k_pe, kv_cache=kv_cache)
        or scattered_slots(slots)
        or _off_vectors(kv_c=kv_c, q_nope=q_nope)
    )


@ops.mla_rope_kv_write.kernel(
    "aiter", layout="paged", refuses=_refuse_mla_rope_kv_write, rounds="once"
)
def mla_rope_kv_write(
    kv_cache: Tensor, slots: Tensor, **operands: Unpack[Operands]
) -> tuple[Tensor, Tensor]:
    q_nope, q_pe, kv_c, k_pe, cos, sin, style = latent_rows(**operands)
    out = q_nope.new_empty((*q_nope.shape[:-1], q_nope.shape[-1] + q_pe.shape[-1]))
    if q_nope.numel():
        one = q_nope.new_ones(1, dtype=torch.float32)  # both are read, and scale nothing
        fused_qk_rope_concat_and_cache_mla(
            q_nope,
            q_pe,
            kv_c,
            k_pe.squeeze(-2),
            kv_cache,
            out,
            slots,
            one,
            one,
            torch.arange(q_nope.shape[0], device=q_nope.device),  # token t has row t of the tables
            as_rows(cos).contiguous(),
            as_rows(sin).contiguous(),
            style != "gptj",
            True,
            compute_all_q_rope=True,
        )
    return with_lead(out, operands["q_nope"]), out.new_empty((0,))
