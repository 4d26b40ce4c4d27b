"""The cache of multi-head latent attention in Triton: the write of latents, and the rotation of
queries and keys with it.

A program takes the query rows of some tokens, or writes some tokens into the cache.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from atomc import ops
from atomc.kernels.checks import (
    first_refusal,
    named,
    scattered_blocks,
    scattered_slots,
    too_wide,
    wrong_rank,
)
from atomc.kernels.triton.launch.launch import (
    TRITON_DTYPE,
    at,
    begin,
    inner_sizes,
    num_rows,
    overlap,
    rows_of,
    unfit,
)
from atomc.kernels.triton.launch.tiles import HEAD_ROWS
from atomc.kernels.triton.rows.kv_write import (
    cache_of,
    codes_of,
    copy_rows,
    inverse_scale,
    uncachable,
)
from atomc.kernels.triton.rows.rope import (
    HeadParts,
    head_parts,
    refuse_rope,
    rotated,
    store_parts,
    tables_of,
)
from atomc.ops.mla import empty_queries
from atomc.ops.op import Refusal
from atomc.platform import Platform

MAX_WIDTH = 2048


@triton.jit
def write_latents(
    kv_c,
    k_pe,
    tables,
    cache,
    slots_ptr,
    row,
    rows,
    c_sizes,
    p_sizes,
    L: constexpr,
    OUT: constexpr,
    PARTS: constexpr,
    CODES: constexpr,
    BY_BITS: constexpr,
):
    """Write the tokens `row` [ROWS, 1] into the cache: the latent, then the key, rotated unless the
    style of PARTS is "".
    """
    slot = tl.load(slots_ptr + row, row < rows, -1)
    inside = slot >= 0
    target = cache.ptr + slot * cache.token
    inverse = inverse_scale(cache.scale)
    copy_rows(at(kv_c, row, c_sizes), target, inside, inverse, L, CODES, BY_BITS)
    if PARTS.style == "":
        key_at = at(k_pe, row, p_sizes)
        copy_rows(key_at, target + L, inside, inverse, PARTS.columns, CODES, BY_BITS)
    else:
        parts = rotated(k_pe, row, inside, p_sizes, None, tables, 0.0, OUT, PARTS, "")
        store_parts(target + L, inside, parts, inverse, PARTS, CODES, BY_BITS)


@triton.jit
def rotate_query(
    q_pe,
    tables,
    q_out_ptr,
    row,
    inside,
    sizes,
    P: constexpr,
    OUT: constexpr,
    PARTS: constexpr,
):
    """Rotate query rows (token * heads + head) into the columns of the result from P on."""
    parts = rotated(q_pe, row, inside, sizes, None, tables, 0.0, OUT, PARTS, "")
    target = q_out_ptr + (row.to(tl.int64) * (P + PARTS.columns) + P)
    store_parts(target, inside, parts, 1.0, PARTS, "", False)


@triton.jit(do_not_specialize=["rows"])
def _mla_kv_write(
    kv_c,
    k_pe,
    cache,
    slots_ptr,
    rows,
    c_sizes,
    p_sizes,
    L: constexpr,
    PARTS: constexpr,
    ROWS: constexpr,
    CODES: constexpr,
    BY_BITS: constexpr,
    PDL: constexpr,
):
    begin(PDL)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    write_latents(
        kv_c,
        k_pe,
        None,
        cache,
        slots_ptr,
        row,
        rows,
        c_sizes,
        p_sizes,
        L,
        None,
        PARTS,
        CODES,
        BY_BITS,
    )


@triton.jit(do_not_specialize=["q_rows", "rows", "q_programs"])
def _mla_rope_kv_write(
    q_nope,
    q_pe,
    kv_c,
    k_pe,
    q_tables,
    k_tables,
    q_out_ptr,
    cache,
    slots_ptr,
    q_rows,
    rows,
    q_programs,
    q_sizes,
    c_sizes,
    p_sizes,
    P: constexpr,
    L: constexpr,
    OUT: constexpr,
    PARTS: constexpr,
    ROWS: constexpr,
    CODES: constexpr,
    BY_BITS: constexpr,
    PDL: constexpr,
):
    program = tl.program_id(0)
    begin(PDL)
    if program < q_programs:
        row = program * ROWS + tl.arange(0, ROWS)[:, None]
        inside = row < q_rows
        target = q_out_ptr + row.to(tl.int64) * (P + PARTS.columns)
        copy_rows(at(q_nope, row, q_sizes), target, inside, 1.0, P, "", False)
        rotate_query(q_pe, q_tables, q_out_ptr, row, inside, q_sizes, P, OUT, PARTS)
    else:
        row = (program - q_programs) * ROWS + tl.arange(0, ROWS)[:, None]
        write_latents(
            kv_c,
            k_pe,
            k_tables,
            cache,
            slots_ptr,
            row,
            rows,
            c_sizes,
            p_sizes,
            L,
            OUT,
            PARTS,
            CODES,
            BY_BITS,
        )


refuse_mla_kv_write = first_refusal(
    named("platform kv_c k_pe", unfit),
    lambda platform, kv_cache, scale: uncachable(platform, {"scale": scale}, kv_cache=kv_cache),
    named("kv_c", wrong_rank, (2, 3)),
    lambda kv_c: too_wide(kv_c.shape[-1], MAX_WIDTH, "a latent"),
    scattered_slots,
    lambda kv_cache: scattered_blocks(kv_cache),
)


@ops.mla_kv_write.kernel(
    "triton", layout="paged", refuses=refuse_mla_kv_write, tuned_for=HEAD_ROWS.archs
)
def mla_kv_write(
    kv_c: Tensor, k_pe: Tensor, kv_cache: Tensor, slots: Tensor, scale: Tensor | None
) -> Tensor:
    if rows := num_rows(kv_c):
        rows_a_program = HEAD_ROWS.choose(kv_c.device, rows)
        _mla_kv_write[(triton.cdiv(rows, rows_a_program),)](
            *map(rows_of, (kv_c, k_pe)),
            cache_of(kv_cache, scale),
            slots,
            rows,
            *map(inner_sizes, (kv_c, k_pe)),
            L=kv_c.shape[-1],
            PARTS=HeadParts("", k_pe.shape[-1]),
            ROWS=rows_a_program,
            num_warps=4,
            **codes_of(kv_cache),
            **overlap(kv_c.device),
        )
    return kv_c.new_empty((0,))


def refuse_rotation(
    platform: Platform,
    q_nope: Tensor,
    q_pe: Tensor,
    k_pe: Tensor,
    cos: Tensor,
    sin: Tensor,
    rope_style: str,
) -> Refusal | None:
    if reason := unfit(platform, q_nope=q_nope):
        return reason
    if q_pe.dtype != k_pe.dtype or q_nope.dim() != q_pe.dim() or q_nope.dim() not in (3, 4):
        return Refusal(
            "dtype",
            "queries must be [T, H, .] or [B, T, H, .], and q_pe of the dtype of k_pe",
        )
    return refuse_rope(platform, q_pe, cos, sin, rope_style) or refuse_rope(
        platform, k_pe, cos, sin, rope_style
    )


refuse_mla_rope_kv_write = first_refusal(refuse_mla_kv_write, refuse_rotation)


@ops.mla_rope_kv_write.kernel(
    "triton", layout="paged", refuses=refuse_mla_rope_kv_write, tuned_for=HEAD_ROWS.archs
)
def mla_rope_kv_write(
    q_nope: Tensor,
    q_pe: Tensor,
    kv_c: Tensor,
    k_pe: Tensor,
    cos: Tensor,
    sin: Tensor,
    kv_cache: Tensor,
    slots: Tensor,
    scale: Tensor | None,
    rope_style: str,
) -> tuple[Tensor, Tensor]:
    nope = q_nope.shape[-1]
    out = empty_queries(q_nope, q_pe, cos)
    if rows := num_rows(kv_c):
        q_rows = num_rows(q_nope)
        rows_a_program = HEAD_ROWS.choose(kv_c.device, q_rows)
        q_programs = triton.cdiv(q_rows, rows_a_program)
        _mla_rope_kv_write[(q_programs + triton.cdiv(rows, rows_a_program),)](
            *map(rows_of, (q_nope, q_pe, kv_c, k_pe)),
            tables_of(cos, sin, q_pe),
            tables_of(cos, sin, k_pe),
            out,
            cache_of(kv_cache, scale),
            slots,
            q_rows,
            rows,
            q_programs,
            *map(inner_sizes, (q_nope, kv_c, k_pe)),
            P=nope,
            L=kv_c.shape[-1],
            OUT=TRITON_DTYPE[torch.promote_types(q_pe.dtype, cos.dtype)],
            PARTS=head_parts(q_pe, cos, rope_style),
            ROWS=rows_a_program,
            **codes_of(kv_cache),
            **overlap(kv_c.device),
        )
    return out, kv_c.new_empty((0,))
