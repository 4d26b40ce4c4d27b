"""Multi-head latent attention in Triton: the rotation of queries and keys with the write into the
latent cache, and, fused with it, the quantized product that projects queries to the latent space.

A program takes the query rows of some tokens, or writes some tokens into the cache. The product
quantizes queries in registers; codes are multiplied as fp16, which represents each exactly, and
accumulated in fp32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from atomc import ops
from atomc.graph.sizes import known_equal
from atomc.kernels.checks import (
    odd_group,
    scattered_blocks,
    scattered_slots,
    strided,
    too_wide,
    unknown,
    wrong_rank,
)
from atomc.kernels.triton.kv_write import (
    as_numbers,
    codes_of,
    copy_rows,
    in_bytes,
    inverse_scale,
    uncachable,
)
from atomc.kernels.triton.launch import (
    TRITON_DTYPE,
    begin,
    inner_sizes,
    num_rows,
    overlap,
    row_offset,
    row_strides,
    unfit,
)
from atomc.kernels.triton.mxfp4 import e2m1_rows, e2m1_values, e8m0_values
from atomc.kernels.triton.quant import amax_bits, amax_scale, by_bits, e2m1_codes, fp8_codes
from atomc.kernels.triton.rope import (
    cut_rows,
    refuse_rope,
    rotated,
    store_parts,
    table_strides,
)
from atomc.kernels.triton.tiles import HEAD_ROWS
from atomc.ops.formats import FP8, MX_ROUNDINGS
from atomc.ops.mla import BMM_SCHEMES
from atomc.ops.op import Refusal
from atomc.platform import Platform

MAX_WIDTH = 2048
# Tile of the product: tokens, and columns of the latent. Not measured on any GPU.
BLOCK_M, BLOCK_L = 16, 64


@triton.jit
def _write(
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
def _rotate_query(
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
    _write(
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
        _rotate_query(
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
        _write(
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


@triton.jit
def _product(
    q_ptr,
    weight_ptr,
    weight_scale_ptr,
    q_at,
    inside,
    head,
    first,
    w_head,
    w_row,
    s_head,
    s_row,
    L: tl.constexpr,
    P: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_L: tl.constexpr,
    SCHEME: tl.constexpr,
    W_CODES: tl.constexpr,
    Q_BY_BITS: tl.constexpr,
    MX_BIAS: tl.constexpr,
):
    """Query rows of one head, quantized, times BLOCK_L rows of the weight from `first` on:
    [BLOCK_M, BLOCK_L] in fp32.
    """
    acc = tl.zeros([BLOCK_M, BLOCK_L], tl.float32)
    out = first + tl.arange(0, BLOCK_L)
    w_at = head.to(tl.int64) * w_head + out[:, None].to(tl.int64) * w_row
    for start in range(0, P, BLOCK_P):
        p = start + tl.arange(0, BLOCK_P)
        q = tl.load(q_ptr + q_at + p[None, :], inside & (p < P)[None, :], 0.0).to(tl.float32)
        there = (out < L)[:, None] & (p < P)[None, :]
        # A block of columns is a group with one scale.
        if SCHEME == "fp8":
            LARGEST: tl.constexpr = 240.0 if W_CODES == "fnuz" else 448.0
            scale = amax_scale(q, 1, LARGEST)[:, None]
            codes = fp8_codes(q * tl.div_rn(1.0, scale), W_CODES == "fnuz", Q_BY_BITS)
            weight = as_numbers(
                tl.load(weight_ptr + w_at + p[None, :], there, 0), tl.float16, W_CODES
            )
            acc += tl.dot(as_numbers(codes, tl.float16, W_CODES), tl.trans(weight)) * scale
        else:
            amax = amax_bits(q, 1)
            code = tl.maximum(((amax + MX_BIAS) >> 23) - 2, 0)
            code = tl.where(amax >= 0x7F800000, 255, code)[:, None]
            values = e2m1_values(e2m1_codes(q * e8m0_values(tl.maximum(254 - code, 0)))).to(
                tl.float16
            )
            weight = e2m1_rows(weight_ptr + w_at, p[None, :], there)
            s_at = head.to(tl.int64) * s_head + out.to(tl.int64) * s_row + start // 32
            w_scale = e8m0_values(tl.load(weight_scale_ptr + s_at, out < L, 127))
            acc += tl.dot(values, tl.trans(weight)) * e8m0_values(code) * w_scale[None, :]
    if SCHEME == "fp8":
        EXPONENTS: tl.constexpr = 128.0 * 128.0 if W_CODES == "fnuz" else 256.0 * 256.0
        acc *= tl.load(weight_scale_ptr).to(tl.float32) * EXPONENTS
    return acc


@triton.jit(do_not_specialize=["rows"])
def _bmm_rope_kv_write(
    q_nope_ptr,
    weight_ptr,
    weight_scale_ptr,
    q_pe_ptr,
    kv_c_ptr,
    k_pe_ptr,
    cos_ptr,
    sin_ptr,
    q_out_ptr,
    cache_ptr,
    slots_ptr,
    scale_ptr,
    rows,
    d1,
    n0,
    n1,
    n2,
    w_head,
    w_row,
    s_head,
    s_row,
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
    HEADS: tl.constexpr,
    L: tl.constexpr,
    WHOLE_L: tl.constexpr,
    P: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_L: tl.constexpr,
    SCHEME: tl.constexpr,
    W_CODES: tl.constexpr,
    Q_BY_BITS: tl.constexpr,
    MX_BIAS: tl.constexpr,
    OUT: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    STYLE: tl.constexpr,
    CODES: tl.constexpr,
    BY_BITS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Axis 1 of the grid: the tiles of the latent of each head, of which the first also rotates the
    queries; then one program that writes the cache.
    """
    TILES: tl.constexpr = (L + BLOCK_L - 1) // BLOCK_L
    token = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    part = tl.program_id(1)
    begin(PDL)
    if part < HEADS * TILES:
        head = part // TILES
        first = part % TILES * BLOCK_L
        inside = token < rows
        row = token * HEADS + head
        latent = _product(
            q_nope_ptr,
            weight_ptr,
            weight_scale_ptr,
            row_offset(row, d1, HEADS, n0, n1, n2),
            inside,
            head,
            first,
            w_head,
            w_row,
            s_head,
            s_row,
            L,
            P,
            BLOCK_P,
            BLOCK_M,
            BLOCK_L,
            SCHEME,
            W_CODES,
            Q_BY_BITS,
            MX_BIAS,
        )
        latent = latent.to(q_nope_ptr.dtype.element_ty).to(tl.float32)
        column = first + tl.arange(0, BLOCK_L)[None, :]
        tl.store(
            q_out_ptr + row.to(tl.int64) * (L + D) + column,
            latent.to(q_out_ptr.dtype.element_ty),
            inside & (column < L),
        )
        if first == 0:
            _rotate_query(
                q_pe_ptr,
                cos_ptr,
                sin_ptr,
                q_out_ptr,
                row,
                inside,
                d1,
                HEADS,
                q0,
                q1,
                q2,
                qt0,
                qt1,
                qt2,
                L + D,
                L,
                OUT,
                D,
                HALF,
                BLOCK,
                BLOCK_REST,
                STYLE,
            )
    else:
        _write(
            kv_c_ptr,
            k_pe_ptr,
            cos_ptr,
            sin_ptr,
            cache_ptr,
            slots_ptr,
            scale_ptr,
            token,
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
            WHOLE_L,
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
) -> Refusal | None:
    if reason := unfit(platform, kv_c=kv_c, k_pe=k_pe) or uncachable(
        platform, {"scale": scale}, kv_cache=kv_cache
    ):
        return reason
    return (
        wrong_rank((2, 3), kv_c=kv_c)
        or too_wide(kv_c.shape[-1], MAX_WIDTH, "a latent")
        or scattered_slots(slots)
        or scattered_blocks(kv_cache)
    )


def _latent_rows(kv_c: Tensor) -> tuple[int, int, int, int]:
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
            in_bytes(kv_cache),
            slots,
            scale,
            rows,
            *_latent_rows(kv_c),
            *inner_sizes(k_pe),
            *row_strides(k_pe),
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


def refuse_mla_rope_kv_write(
    platform: Platform,
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
) -> Refusal | None:
    if reason := refuse_mla_kv_write(platform, kv_c, k_pe, kv_cache, slots, scale) or unfit(
        platform, q_nope=q_nope
    ):
        return reason
    if q_pe.dtype != k_pe.dtype or q_nope.dim() != q_pe.dim() or q_nope.dim() not in (3, 4):
        return Refusal(
            "dtype",
            "queries must be [T, H, .] or [B, T, H, .], and q_pe of the dtype of k_pe",
        )
    return refuse_rope(platform, q_pe, cos, sin, rope_style) or refuse_rope(
        platform, k_pe, cos, sin, rope_style
    )


def _result(q_nope: Tensor, width: int, q_pe: Tensor, cos: Tensor) -> tuple[Tensor, torch.dtype]:
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
    out, turned = _result(q_nope, nope, q_pe, cos)
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
            in_bytes(kv_cache),
            slots,
            scale,
            q_rows,
            rows,
            q_programs,
            *inner_sizes(q_nope),
            *row_strides(q_nope),
            *row_strides(q_pe),
            *_latent_rows(kv_c),
            *inner_sizes(k_pe),
            *row_strides(k_pe),
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


def refuse_bmm_rope_kv_write(
    platform: Platform,
    q_nope: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    q_pe: Tensor,
    kv_c: Tensor,
    k_pe: Tensor,
    cos: Tensor,
    sin: Tensor,
    kv_cache: Tensor,
    slots: Tensor,
    scale: Tensor | None = None,
    *,
    scheme: str,
    rope_style: str = "neox",
    group: int = 128,
    dtype: torch.dtype = torch.float8_e4m3fn,
    rounding: str = "even",
) -> Refusal | None:
    if reason := (
        refuse_mla_rope_kv_write(
            platform, q_nope, q_pe, kv_c, k_pe, cos, sin, kv_cache, slots, scale, rope_style
        )
        or unknown(BMM_SCHEMES, scheme=scheme)
        or strided(weight=weight)
    ):
        return reason
    if scheme == "fp8":
        if dtype not in FP8 or weight.dtype != dtype:
            return Refusal(
                "dtype",
                f"queries are quantized to {dtype}, the weight is {weight.dtype}: written for "
                "one kind of fp8",
            )
        return odd_group(group, 16)
    if (
        q_nope.shape[-1] % 32
        or rounding not in MX_ROUNDINGS
        or not known_equal(weight_scale.stride(-1), 1)
    ):
        return Refusal(
            "shape",
            f"mxfp4 takes rows of a multiple of 32, here {q_nope.shape[-1]}, rounded as one of "
            f"{tuple(MX_ROUNDINGS)}",
        )
    return None


@ops.bmm_rope_kv_write.kernel(
    "triton", layout="paged", refuses=refuse_bmm_rope_kv_write, tuned_for=()
)
def bmm_rope_kv_write(
    q_nope: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    q_pe: Tensor,
    kv_c: Tensor,
    k_pe: Tensor,
    cos: Tensor,
    sin: Tensor,
    kv_cache: Tensor,
    slots: Tensor,
    scale: Tensor | None = None,
    *,
    scheme: str,
    rope_style: str = "neox",
    group: int = 128,
    dtype: torch.dtype = torch.float8_e4m3fn,
    rounding: str = "even",
) -> tuple[Tensor, Tensor]:
    heads, latent = weight.shape[:2]
    out, turned = _result(q_nope, latent, q_pe, cos)
    if rows := num_rows(kv_c):
        fp8, whole = scheme == "fp8", triton.next_power_of_2(latent)
        _bmm_rope_kv_write[(triton.cdiv(rows, BLOCK_M), heads * triton.cdiv(latent, BLOCK_L) + 1)](
            q_nope,
            in_bytes(weight),
            weight_scale,
            q_pe,
            kv_c,
            k_pe,
            cos,
            sin,
            out,
            in_bytes(kv_cache),
            slots,
            scale,
            rows,
            inner_sizes(q_nope)[0],
            *row_strides(q_nope),
            *weight.stride()[:2],
            *((0, 0) if fp8 else weight_scale.stride()[:2]),
            *row_strides(q_pe),
            *_latent_rows(kv_c),
            *inner_sizes(k_pe),
            *row_strides(k_pe),
            *table_strides(cos, q_pe),
            *table_strides(cos, k_pe),
            kv_cache.stride(1),
            HEADS=heads,
            L=latent,
            WHOLE_L=whole,
            P=q_nope.shape[-1],
            BLOCK_P=group if fp8 else 32,
            BLOCK_M=BLOCK_M,
            BLOCK_L=BLOCK_L,
            SCHEME=scheme,
            W_CODES=codes_of(weight)["CODES"],
            Q_BY_BITS=fp8 and by_bits(dtype, weight.device),
            MX_BIAS=MX_ROUNDINGS[rounding],
            OUT=TRITON_DTYPE[turned],
            STYLE=rope_style,
            **cut_rows(q_pe, cos, rope_style),
            **codes_of(kv_cache),
            **overlap(kv_c.device),
        )
    return out, kv_c.new_empty((0,))
