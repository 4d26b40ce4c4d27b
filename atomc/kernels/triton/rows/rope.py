"""RoPE in Triton, optionally after q/k norms.

A program takes a few rows of q or of k, each one head of one token. A row has three parts: the two
halves that are rotated, R/2 wide each, and the rest, which passes through.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from atomc import ops
from atomc.graph.sizes import known_equal
from atomc.kernels.checks import unknown, unlike
from atomc.kernels.triton.launch.launch import (
    TRITON_DTYPE,
    begin,
    inner_sizes,
    num_rows,
    overlap,
    row_offset,
    row_strides,
    unfit,
)
from atomc.kernels.triton.launch.tiles import HEAD_ROWS
from atomc.kernels.triton.rows.kv_write import (
    stored_values,
)
from atomc.kernels.triton.rows.norm import normed_dtype, weighted
from atomc.ops.formats import FLOATS
from atomc.ops.norm import RMS_NORM_STYLES
from atomc.ops.op import Refusal
from atomc.ops.rope import FULL_WIDTH_STYLES, ROPE_STYLES, columns_per_angle
from atomc.platform import Platform


@triton.jit
def _parts(
    ptr,
    at,
    inside,
    D: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    STYLE: tl.constexpr,
):
    """The two rotated halves and the rest of rows at offsets `at`, in fp32."""
    i = tl.arange(0, BLOCK)[None, :]
    first, second = i, i + HALF
    if STYLE == "gptj" or STYLE == "pairs_to_half" or STYLE == "pairs":
        first, second = 2 * i, 2 * i + 1
    a = tl.load(ptr + at + first, (i < HALF) & inside, 0.0).to(tl.float32)
    b = tl.load(ptr + at + second, (i < HALF) & inside, 0.0).to(tl.float32)
    rest = a
    if D > 2 * HALF:
        j = 2 * HALF + tl.arange(0, BLOCK_REST)[None, :]
        rest = tl.load(ptr + at + j, (j < D) & inside, 0.0).to(tl.float32)
    return a, b, rest


@triton.jit
def store_parts(
    ptr,
    at,
    inside,
    a,
    b,
    rest,
    inverse,
    D: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    STYLE: tl.constexpr,
    CODES: tl.constexpr,
    BY_BITS: tl.constexpr,
):
    """Store the parts of rows at offsets `at`, converted for a cache."""
    DTYPE: tl.constexpr = ptr.dtype.element_ty
    i = tl.arange(0, BLOCK)[None, :]
    first, second = i, i + HALF
    if STYLE == "gptj" or STYLE == "pairs":
        first, second = 2 * i, 2 * i + 1
    tl.store(
        ptr + at + first, stored_values(a, inverse, DTYPE, CODES, BY_BITS), inside & (i < HALF)
    )
    tl.store(
        ptr + at + second, stored_values(b, inverse, DTYPE, CODES, BY_BITS), inside & (i < HALF)
    )
    if D > 2 * HALF:
        j = 2 * HALF + tl.arange(0, BLOCK_REST)[None, :]
        tl.store(
            ptr + at + j, stored_values(rest, inverse, DTYPE, CODES, BY_BITS), inside & (j < D)
        )


@triton.jit
def _rounded(x, DTYPE: tl.constexpr):
    return x.to(DTYPE).to(tl.float32)


@triton.jit
def rotated(
    x_ptr,
    at,
    inside,
    weight_ptr,
    cos_ptr,
    sin_ptr,
    table_at,
    eps,
    NORMED: tl.constexpr,
    OUT: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    NORM: tl.constexpr,
    STYLE: tl.constexpr,
):
    """The parts of rows at offsets `at`, normalized (and rounded to NORMED) unless NORM is "", and
    rotated (and rounded to OUT).
    """
    a, b, rest = _parts(x_ptr, at, inside, D, HALF, BLOCK, BLOCK_REST, STYLE)
    if NORM != "":
        square = tl.sum(a * a, 1) + tl.sum(b * b, 1)
        if D > 2 * HALF:
            square += tl.sum(rest * rest, 1)
        scale = tl.rsqrt(square / D + eps)[:, None]
        a_weight, b_weight, rest_weight = _parts(
            weight_ptr, at * 0, inside, D, HALF, BLOCK, BLOCK_REST, STYLE
        )
        DTYPE: tl.constexpr = x_ptr.dtype.element_ty
        a = _rounded(weighted(a * scale, a_weight, DTYPE, NORM), NORMED)
        b = _rounded(weighted(b * scale, b_weight, DTYPE, NORM), NORMED)
        rest = _rounded(weighted(rest * scale, rest_weight, DTYPE, NORM), NORMED)
    i = tl.arange(0, BLOCK)[None, :]
    column = inside & (i < HALF)
    of_first, of_second = i, i + HALF
    if STYLE == "pairs":
        of_first, of_second = 2 * i, 2 * i + 1
    cos = tl.load(cos_ptr + table_at + of_first, column, 0.0).to(tl.float32)
    sin = tl.load(sin_ptr + table_at + of_first, column, 0.0).to(tl.float32)
    second_cos, second_sin = cos, sin
    if STYLE == "neox" or STYLE == "pairs":
        second_cos = tl.load(cos_ptr + table_at + of_second, column, 0.0).to(tl.float32)
        second_sin = tl.load(sin_ptr + table_at + of_second, column, 0.0).to(tl.float32)
    first = _rounded(a * cos, OUT) - _rounded(b * sin, OUT)
    second = _rounded(b * second_cos, OUT) + _rounded(a * second_sin, OUT)
    return _rounded(first, OUT), _rounded(second, OUT), rest


@triton.jit(do_not_specialize=["q_rows", "k_rows", "q_programs"])
def _rope(
    q_ptr,
    k_ptr,
    q_weight_ptr,
    k_weight_ptr,
    cos_ptr,
    sin_ptr,
    q_out_ptr,
    k_out_ptr,
    q_rows,
    k_rows,
    q_programs,
    q_d1,
    q_d2,
    k_d1,
    k_d2,
    q0,
    q1,
    q2,
    k0,
    k1,
    k2,
    t0,
    t1,
    t2,
    q_out0,
    q_out1,
    q_out2,
    k_out0,
    k_out1,
    k_out2,
    eps,
    NORMED: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    ROWS: tl.constexpr,
    NORM: tl.constexpr,
    STYLE: tl.constexpr,
    PDL: tl.constexpr,
):
    program = tl.program_id(0)
    begin(PDL)
    OUT: tl.constexpr = q_out_ptr.dtype.element_ty
    if program < q_programs:
        row = program * ROWS + tl.arange(0, ROWS)[:, None]
        inside = row < q_rows
        a, b, rest = rotated(
            q_ptr,
            row_offset(row, q_d1, q_d2, q0, q1, q2),
            inside,
            q_weight_ptr,
            cos_ptr,
            sin_ptr,
            row_offset(row, q_d1, q_d2, t0, t1, t2),
            eps,
            NORMED,
            OUT,
            D,
            HALF,
            BLOCK,
            BLOCK_REST,
            NORM,
            STYLE,
        )
        store_parts(
            q_out_ptr,
            row_offset(row, q_d1, q_d2, q_out0, q_out1, q_out2),
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
    elif k_ptr is not None:
        row = (program - q_programs) * ROWS + tl.arange(0, ROWS)[:, None]
        inside = row < k_rows
        a, b, rest = rotated(
            k_ptr,
            row_offset(row, k_d1, k_d2, k0, k1, k2),
            inside,
            k_weight_ptr,
            cos_ptr,
            sin_ptr,
            row_offset(row, k_d1, k_d2, t0, t1, t2),
            eps,
            NORMED,
            OUT,
            D,
            HALF,
            BLOCK,
            BLOCK_REST,
            NORM,
            STYLE,
        )
        store_parts(
            k_out_ptr,
            row_offset(row, k_d1, k_d2, k_out0, k_out1, k_out2),
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


def table_strides(table: Tensor, x: Tensor) -> tuple[int, int, int]:
    """The strides of a table for the rows of x, zero where it is broadcast."""
    strides = [0] * (x.dim() - table.dim())
    strides += [
        0 if size == 1 else step
        for size, step in zip(table.shape[:-1], table.stride()[:-1], strict=True)
    ]
    last = strides[-1] if x.dim() > 2 else 0
    return strides[0] if strides else 0, strides[1] if x.dim() > 3 else 0, last


def cut_rows(x: Tensor, cos: Tensor, style: str) -> dict[str, int]:
    """The parts of a row of x, as launch arguments."""
    half = cos.shape[-1] * columns_per_angle(style) // 2
    rest = x.shape[-1] - 2 * half
    return {
        "D": x.shape[-1],
        "HALF": half,
        "BLOCK": triton.next_power_of_2(half),
        "BLOCK_REST": triton.next_power_of_2(max(rest, 1)),
    }


def launch_arguments(
    x: Tensor, cos: Tensor, style: str, rows_a_program: int
) -> dict[str, int | bool | str]:
    """Of kernels whose programs rotate so many rows each."""
    return {
        "STYLE": style,
        "ROWS": rows_a_program,
        # H200, qk_norm_rope_kv_write of 48 heads of 128, us with a warp per 1 / 2 / 4 rows: 1 token
        # 2.2 / 2.0 / 1.7, 64 tokens 2.4 / 2.2 / 2.0, 1,024 tokens 10.3 / 9.3 / 9.3, 65,536 tokens
        # 517 / 416 / 397.
        "num_warps": rows_a_program // 4,
        **cut_rows(x, cos, style),
        **overlap(x.device),
    }


def empty_rows(x: Tensor, cos: Tensor, style: str, dtype: torch.dtype) -> Tensor:
    """Empty rows for the rotated x. They are contiguous as in the reference, which concatenates
    unless full-width tables rotate whole rows.
    """
    rotates_all = style in FULL_WIDTH_STYLES and cos.shape[-1] == x.shape[-1]
    return torch.empty_like(
        x,
        dtype=dtype,
        memory_format=torch.preserve_format if rotates_all else torch.contiguous_format,
    )


def refuse_rope(
    platform: Platform, x: Tensor, cos: Tensor, sin: Tensor, style: str = "neox"
) -> Refusal | None:
    if reason := (
        unfit(platform, x=x, cos=cos, sin=sin)
        or unknown(ROPE_STYLES, style=style)
        or unlike(FLOATS, cos=cos, sin=sin)
    ):
        return reason
    wide = style in FULL_WIDTH_STYLES
    if wide and isinstance(cos.shape[-1], int) and cos.shape[-1] % 2:
        return Refusal("shape", f"{cos.shape[-1]} columns cannot be rotated in pairs")
    if cos.dim() > x.dim():
        return Refusal("shape", "cos and sin have more dimensions than the rotated tensor")
    for mine, size in zip(cos.shape[-2::-1], x.shape[-2::-1], strict=False):
        if not known_equal(mine, 1) and not known_equal(mine, size):
            return Refusal(
                "shape", f"cos and sin have size {mine} along a dimension of size {size}"
            )
    for size, a, b in zip(cos.shape, cos.stride(), sin.stride(), strict=True):
        if not known_equal(size, 1) and not known_equal(a, b):
            return Refusal("layout", "cos and sin have different strides")
    return None


def _launch(
    q: Tensor,
    k: Tensor | None,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    norm: str,
    style: str,
    normed: torch.dtype,
) -> list[Tensor]:
    """The rotated q, and the rotated k if there is one."""
    rotated = [x for x in (q, k) if x is not None]
    outs = [empty_rows(x, cos, style, torch.promote_types(normed, cos.dtype)) for x in rotated]
    q_rows, k_rows = num_rows(q), 0 if k is None else num_rows(k)
    if q_rows + k_rows:
        rows_a_program = HEAD_ROWS.choose(q.device, q_rows + k_rows)
        q_programs = triton.cdiv(q_rows, rows_a_program)
        k_out = None if k is None else outs[1]
        _rope[(q_programs + triton.cdiv(k_rows, rows_a_program),)](
            q,
            k,
            q_weight,
            k_weight,
            cos,
            sin,
            outs[0],
            k_out,
            q_rows,
            k_rows,
            q_programs,
            *inner_sizes(q),
            *((1, 1) if k is None else inner_sizes(k)),
            *row_strides(q),
            *row_strides(k),
            *table_strides(cos, q),
            *row_strides(outs[0]),
            *row_strides(k_out),
            eps,
            NORMED=TRITON_DTYPE[normed],
            NORM=norm,
            **launch_arguments(q, cos, style, rows_a_program),
        )
    return outs


@ops.rope.kernel("triton", refuses=refuse_rope, tuned_for=HEAD_ROWS.archs)
def rope(x: Tensor, cos: Tensor, sin: Tensor, style: str = "neox") -> Tensor:
    [out] = _launch(x, None, None, None, cos, sin, 0.0, "", style, x.dtype)
    return out


def refuse_qk_norm_rope(
    platform: Platform,
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    norm_style: str = "after",
    rope_style: str = "neox",
    **_: object,
) -> Refusal | None:
    """Refuse q and k that cannot be rotated by these tables in one launch."""
    if reason := (
        unknown(RMS_NORM_STYLES, style=norm_style)
        or unfit(platform, q=q, k=k, q_weight=q_weight, k_weight=k_weight)
    ):
        return reason
    if q.dtype != k.dtype or q.dim() != k.dim() or q.shape[-1] != k.shape[-1]:
        return Refusal("dtype", "q and k differ in dtype, rank or width")
    return (
        unlike(FLOATS, q_weight=q_weight, k_weight=k_weight)
        or refuse_rope(platform, q, cos, sin, rope_style)
        or refuse_rope(platform, k, cos, sin, rope_style)
    )


@ops.qk_norm_rope.kernel("triton", refuses=refuse_qk_norm_rope, tuned_for=HEAD_ROWS.archs)
def qk_norm_rope(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    norm_style: str = "after",
    rope_style: str = "neox",
) -> tuple[Tensor, Tensor]:
    normed = normed_dtype(q, q_weight, norm_style)
    q, k = _launch(q, k, q_weight, k_weight, cos, sin, eps, norm_style, rope_style, normed)
    return q, k
