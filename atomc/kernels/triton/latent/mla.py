"""The cache of multi-head latent attention in Triton: the write of latents, and the rotation of
queries and keys with it.

A program takes the query rows of some tokens, or writes some tokens into the cache.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from atomc import ops
from atomc.kernels.checks import (
    first_refusal,
    scattered_blocks,
    scattered_slots,
    too_wide,
    wrong_rank,
)
from atomc.kernels.triton.launch.launch import (
    TRITON_DTYPE,
    begin,
    inner_sizes,
    num_rows,
    overlap,
    row_layout,
    row_offset,
    row_strides,
    unfit,
)
from atomc.kernels.triton.launch.tiles import HEAD_ROWS
from atomc.kernels.triton.rows.kv_write import (
    byte_view,
    codes_of,
    copy_rows,
    inverse_scale,
    uncachable,
)
from atomc.kernels.triton.rows.rope import (
    cut_rows,
    refuse_rope,
    rotated,
    store_parts,
    table_strides,
)
from atomc.ops.op import Refusal
from atomc.platform import Platform

MAX_WIDTH = 2048


@triton.jit
def write_latents(
    kv_c_ptr,
    k_pe_ptr,
    cos_ptr,
    sin_ptr,
    cache_ptr,
    slots_ptr,
    scale_ptr,
    row,
    rows,
    c_d2,
    c0,
    c1,
    c2,
    p_d1,
    p_d2,
    p0,
    p1,
    p2,
    t0,
    t1,
    t2,
    token_stride,
    L: tl.constexpr,
    BLOCK_L: tl.constexpr,
    OUT: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    STYLE: tl.constexpr,
    CODES: tl.constexpr,
    BY_BITS: tl.constexpr,
):
    """Write the tokens `row` [ROWS, 1] into the cache: the latent, then the key, rotated unless
    STYLE is "".
    """
    slot = tl.load(slots_ptr + row, row < rows, -1)
    inside = slot >= 0
    at = slot * token_stride
    inverse = inverse_scale(scale_ptr)
    copy_rows(
        kv_c_ptr,
        row_offset(row, 1, c_d2, c0, c1, c2),
        cache_ptr,
        at,
        inside,
        inverse,
        L,
        BLOCK_L,
        CODES,
        BY_BITS,
    )
    key_at = row_offset(row, p_d1, p_d2, p0, p1, p2)
    if STYLE == "":
        copy_rows(k_pe_ptr, key_at, cache_ptr, at + L, inside, inverse, D, BLOCK, CODES, BY_BITS)
    else:
        a, b, rest = rotated(
            k_pe_ptr,
            key_at,
            inside,
            None,
            cos_ptr,
            sin_ptr,
            row_offset(row, p_d1, p_d2, t0, t1, t2),
            0.0,
            None,
            OUT,
            D,
            HALF,
            BLOCK,
            BLOCK_REST,
            "",
            STYLE,
        )
        store_parts(
            cache_ptr,
            at + L,
            inside,
            a,
            b,
            rest,
            inverse,
            D,
            HALF,
            BLOCK,
            BLOCK_REST,
            STYLE,
            CODES,
            BY_BITS,
        )


@triton.jit
def rotate_query(
    q_pe_ptr,
    cos_ptr,
    sin_ptr,
    q_out_ptr,
    row,
    inside,
    d1,
    heads,
    p0,
    p1,
    p2,
    t0,
    t1,
    t2,
    out_row,
    P: tl.constexpr,
    OUT: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    STYLE: tl.constexpr,
):
    """Rotate query rows (token * heads + head) into the columns of the result from P on."""
    a, b, rest = rotated(
        q_pe_ptr,
        row_offset(row, d1, heads, p0, p1, p2),
        inside,
        None,
        cos_ptr,
        sin_ptr,
        row_offset(row, d1, heads, t0, t1, t2),
        0.0,
        None,
        OUT,
        D,
        HALF,
        BLOCK,
        BLOCK_REST,
        "",
        STYLE,
    )
    store_parts(
        q_out_ptr,
        row.to(tl.int64) * out_row + P,
        inside,
        a,
        b,
        rest,
        1.0,
        D,
        HALF,
        BLOCK,
        BLOCK_REST,
        STYLE,
        "",
        False,
    )


@triton.jit(do_not_specialize=["rows"])
def _mla_kv_write(
    kv_c_ptr,
    k_pe_ptr,
    cache_ptr,
    slots_ptr,
    scale_ptr,
    rows,
    c_d2,
    c0,
    c1,
    c2,
    p_d1,
    p_d2,
    p0,
    p1,
    p2,
    token_stride,
    L: tl.constexpr,
    BLOCK_L: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    CODES: tl.constexpr,
    BY_BITS: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    write_latents(
        kv_c_ptr,
        k_pe_ptr,
        None,
        None,
        cache_ptr,
        slots_ptr,
        scale_ptr,
        row,
        rows,
        c_d2,
        c0,
        c1,
        c2,
        p_d1,
        p_d2,
        p0,
        p1,
        p2,
        0,
        0,
        0,
        token_stride,
        L,
        BLOCK_L,
        None,
        D,
        0,
        BLOCK,
        1,
        "",
        CODES,
        BY_BITS,
    )


@triton.jit(do_not_specialize=["q_rows", "rows", "q_programs"])
def _mla_rope_kv_write(
    q_nope_ptr,
    q_pe_ptr,
    kv_c_ptr,
    k_pe_ptr,
    cos_ptr,
    sin_ptr,
    q_out_ptr,
    cache_ptr,
    slots_ptr,
    scale_ptr,
    q_rows,
    rows,
    q_programs,
    d1,
    heads,
    n0,
    n1,
    n2,
    q0,
    q1,
    q2,
    c_d2,
    c0,
    c1,
    c2,
    p_d1,
    p_d2,
    p0,
    p1,
    p2,
    qt0,
    qt1,
    qt2,
    kt0,
    kt1,
    kt2,
    token_stride,
    P: tl.constexpr,
    BLOCK_P: tl.constexpr,
    L: tl.constexpr,
    BLOCK_L: tl.constexpr,
    OUT: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    STYLE: tl.constexpr,
    ROWS: tl.constexpr,
    CODES: tl.constexpr,
    BY_BITS: tl.constexpr,
    PDL: tl.constexpr,
):
    program = tl.program_id(0)
    begin(PDL)
    if program < q_programs:
        row = program * ROWS + tl.arange(0, ROWS)[:, None]
        inside = row < q_rows
        copy_rows(
            q_nope_ptr,
            row_offset(row, d1, heads, n0, n1, n2),
            q_out_ptr,
            row.to(tl.int64) * (P + D),
            inside,
            1.0,
            P,
            BLOCK_P,
            "",
            False,
        )
        rotate_query(
            q_pe_ptr,
            cos_ptr,
            sin_ptr,
            q_out_ptr,
            row,
            inside,
            d1,
            heads,
            q0,
            q1,
            q2,
            qt0,
            qt1,
            qt2,
            P + D,
            P,
            OUT,
            D,
            HALF,
            BLOCK,
            BLOCK_REST,
            STYLE,
        )
    else:
        row = (program - q_programs) * ROWS + tl.arange(0, ROWS)[:, None]
        write_latents(
            kv_c_ptr,
            k_pe_ptr,
            cos_ptr,
            sin_ptr,
            cache_ptr,
            slots_ptr,
            scale_ptr,
            row,
            rows,
            c_d2,
            c0,
            c1,
            c2,
            p_d1,
            p_d2,
            p0,
            p1,
            p2,
            kt0,
            kt1,
            kt2,
            token_stride,
            L,
            BLOCK_L,
            OUT,
            D,
            HALF,
            BLOCK,
            BLOCK_REST,
            STYLE,
            CODES,
            BY_BITS,
        )


def refuse_mla_kv_write(
    platform: Platform,
    kv_c: Tensor,
    k_pe: Tensor,
    kv_cache: Tensor,
    slots: Tensor,
    scale: Tensor | None = None,
    **_: object,
) -> Refusal | None:
    return (
        unfit(platform, kv_c=kv_c, k_pe=k_pe)
        or uncachable(platform, {"scale": scale}, kv_cache=kv_cache)
        or wrong_rank((2, 3), kv_c=kv_c)
        or too_wide(kv_c.shape[-1], MAX_WIDTH, "a latent")
        or scattered_slots(slots)
        or scattered_blocks(kv_cache)
    )


def latent_strides(kv_c: Tensor) -> tuple[int, int, int, int]:
    """d2, and the strides of d0, d1 and d2; the size d1 of a latent is 1."""
    return inner_sizes(kv_c)[1], *row_strides(kv_c)


@ops.mla_kv_write.kernel(
    "triton", layout="paged", refuses=refuse_mla_kv_write, tuned_for=HEAD_ROWS.archs
)
def mla_kv_write(
    kv_c: Tensor, k_pe: Tensor, kv_cache: Tensor, slots: Tensor, scale: Tensor | None = None
) -> Tensor:
    if rows := num_rows(kv_c):
        rows_a_program = HEAD_ROWS.choose(kv_c.device, rows)
        _mla_kv_write[(triton.cdiv(rows, rows_a_program),)](
            kv_c,
            k_pe,
            byte_view(kv_cache),
            slots,
            scale,
            rows,
            *latent_strides(kv_c),
            *row_layout(k_pe),
            kv_cache.stride(1),
            L=kv_c.shape[-1],
            BLOCK_L=triton.next_power_of_2(kv_c.shape[-1]),
            D=k_pe.shape[-1],
            BLOCK=triton.next_power_of_2(k_pe.shape[-1]),
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
    rope_style: str = "neox",
    **_: object,
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


def empty_queries(
    q_nope: Tensor, width: int, q_pe: Tensor, cos: Tensor
) -> tuple[Tensor, torch.dtype]:
    """Empty queries, with so many columns before the rotated ones, and the dtype in which they are
    rotated.
    """
    turned = torch.promote_types(q_pe.dtype, cos.dtype)
    shape = (*q_nope.shape[:-1], width + q_pe.shape[-1])
    return q_nope.new_empty(shape, dtype=torch.promote_types(q_nope.dtype, turned)), turned


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
    scale: Tensor | None = None,
    rope_style: str = "neox",
) -> tuple[Tensor, Tensor]:
    nope, latent = q_nope.shape[-1], kv_c.shape[-1]
    out, turned = empty_queries(q_nope, nope, q_pe, cos)
    if rows := num_rows(kv_c):
        q_rows = num_rows(q_nope)
        rows_a_program = HEAD_ROWS.choose(kv_c.device, q_rows)
        q_programs = triton.cdiv(q_rows, rows_a_program)
        _mla_rope_kv_write[(q_programs + triton.cdiv(rows, rows_a_program),)](
            q_nope,
            q_pe,
            kv_c,
            k_pe,
            cos,
            sin,
            out,
            byte_view(kv_cache),
            slots,
            scale,
            q_rows,
            rows,
            q_programs,
            *row_layout(q_nope, q_pe),
            *latent_strides(kv_c),
            *row_layout(k_pe),
            *table_strides(cos, q_pe),
            *table_strides(cos, k_pe),
            kv_cache.stride(1),
            P=nope,
            BLOCK_P=triton.next_power_of_2(nope),
            L=latent,
            BLOCK_L=triton.next_power_of_2(latent),
            OUT=TRITON_DTYPE[turned],
            STYLE=rope_style,
            ROWS=rows_a_program,
            **cut_rows(q_pe, cos, rope_style),
            **codes_of(kv_cache),
            **overlap(kv_c.device),
        )
    return out, kv_c.new_empty((0,))
