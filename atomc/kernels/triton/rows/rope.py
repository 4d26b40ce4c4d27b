"""RoPE in Triton, optionally after q/k norms.

A program takes a few rows of q or of k, each one head of one token. A row has three parts: the two
halves that are rotated, R/2 wide each, and the rest, which passes through.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from atomc import ops
from atomc.graph.sizes import known_equal
from atomc.kernels.checks import unknown, unlike
from atomc.kernels.triton.launch.launch import (
    at,
    begin,
    inner_sizes,
    num_rows,
    overlap,
    row_offset,
    rows_of,
    unfit,
)
from atomc.kernels.triton.launch.tiles import HEAD_ROWS
from atomc.kernels.triton.rows.kv_write import stored_values
from atomc.kernels.triton.rows.norm import normed_dtype, weighted
from atomc.ops.formats import FLOATS
from atomc.ops.norm import RMS_NORM_STYLES
from atomc.ops.op import Refusal
from atomc.ops.rope import FULL_WIDTH_STYLES, ROPE_STYLES, columns_per_angle
from atomc.platform import Platform


class HeadParts(NamedTuple):
    """What a row consists of, and how it is rotated: a constant of a kernel.

    style          one of ROPE_STYLES; "": the row is not rotated
    columns, half  the widths of a row, and of each of the two parts that are rotated
    rest           that of what is behind them
    in_fp32        products and sums are not rounded
    """

    style: str
    columns: int
    half: int = 0
    rest: int = 0
    in_fp32: bool = False


class Tables(NamedTuple):
    """cos and sin for rows as one argument of a kernel, with the strides of both."""

    cos: Tensor
    sin: Tensor
    s0: int
    s1: int
    s2: int


@triton.jit
def _halves(inside, PARTS: constexpr, PAIRS: constexpr):
    """The columns of the two parts that are rotated, and which are there."""
    i = tl.arange(0, triton.next_power_of_2(PARTS.half))[None, :]
    inside = inside & (i < PARTS.half)
    if PAIRS:
        return 2 * i, 2 * i + 1, inside
    else:
        return i, i + PARTS.half, inside


@triton.jit
def _rest(inside, PARTS: constexpr):
    """The columns behind them, and which are there."""
    j = 2 * PARTS.half + tl.arange(0, triton.next_power_of_2(PARTS.rest))[None, :]
    return j, inside & (j < PARTS.columns)


@triton.jit
def _parts(at, inside, PARTS: constexpr):
    """The two rotated halves and the rest of rows, in fp32."""
    STYLE: constexpr = PARTS.style
    PAIRS: constexpr = STYLE == "gptj" or STYLE == "pairs_to_half" or STYLE == "pairs"
    first, second, there = _halves(inside, PARTS, PAIRS)
    a = tl.load(at + first, there, 0.0).to(tl.float32)
    b = tl.load(at + second, there, 0.0).to(tl.float32)
    rest = a
    if PARTS.rest > 0:
        j, there = _rest(inside, PARTS)
        rest = tl.load(at + j, there, 0.0).to(tl.float32)
    return a, b, rest


@triton.jit
def store_parts(
    at,
    inside,
    parts,
    inverse,
    PARTS: constexpr,
    CODES: constexpr,
    BY_BITS: constexpr,
):
    """Store the parts of rows, converted for a cache."""
    a, b, rest = parts
    DTYPE: constexpr = at.dtype.element_ty
    PAIRS: constexpr = PARTS.style == "gptj" or PARTS.style == "pairs"
    first, second, there = _halves(inside, PARTS, PAIRS)
    tl.store(at + first, stored_values(a, inverse, DTYPE, CODES, BY_BITS), there)
    tl.store(at + second, stored_values(b, inverse, DTYPE, CODES, BY_BITS), there)
    if PARTS.rest > 0:
        j, there = _rest(inside, PARTS)
        tl.store(at + j, stored_values(rest, inverse, DTYPE, CODES, BY_BITS), there)


@triton.jit
def _rounded(x, DTYPE: constexpr):
    return x.to(DTYPE).to(tl.float32)


@triton.jit
def rotated(
    x,
    row,
    inside,
    sizes,
    weight_ptr,
    tables,
    eps,
    OUT: constexpr,
    PARTS: constexpr,
    NORM: constexpr,
):
    """The parts of rows of x, normalized (and rounded) unless NORM is "", and rotated (and rounded
    to OUT, products too unless in fp32).
    """
    ROUNDED: constexpr = tl.float32 if PARTS.in_fp32 else OUT
    a, b, rest = _parts(at(x, row, sizes), inside, PARTS)
    if NORM != "":
        square = tl.sum(a * a, 1) + tl.sum(b * b, 1)
        if PARTS.rest > 0:
            square += tl.sum(rest * rest, 1)
        scale = tl.rsqrt(square / PARTS.columns + eps)[:, None]
        a_weight, b_weight, rest_weight = _parts(weight_ptr + row * 0, inside, PARTS)
        DTYPE: constexpr = x.ptr.dtype.element_ty
        # Of two dtypes fp32 is the common one.
        SAME: constexpr = NORM != "after" or weight_ptr.dtype.element_ty == DTYPE
        NORMED: constexpr = DTYPE if SAME else tl.float32
        a = _rounded(weighted(a * scale, a_weight, DTYPE, NORM), NORMED)
        b = _rounded(weighted(b * scale, b_weight, DTYPE, NORM), NORMED)
        rest = _rounded(weighted(rest * scale, rest_weight, DTYPE, NORM), NORMED)
    table_at = row_offset(tables, row, sizes)
    cos_at, sin_at = tables.cos + table_at, tables.sin + table_at
    first, second, there = _halves(inside, PARTS, PARTS.style == "pairs")
    cos = tl.load(cos_at + first, there, 0.0).to(tl.float32)
    sin = tl.load(sin_at + first, there, 0.0).to(tl.float32)
    second_cos, second_sin = cos, sin
    if PARTS.style == "neox" or PARTS.style == "pairs":
        second_cos = tl.load(cos_at + second, there, 0.0).to(tl.float32)
        second_sin = tl.load(sin_at + second, there, 0.0).to(tl.float32)
    c = _rounded(a * cos, ROUNDED) - _rounded(b * sin, ROUNDED)
    d = _rounded(b * second_cos, ROUNDED) + _rounded(a * second_sin, ROUNDED)
    return _rounded(c, OUT), _rounded(d, OUT), rest


@triton.jit
def rotate(
    x,
    out,
    program,
    rows,
    sizes,
    weight_ptr,
    tables,
    eps,
    ROWS: constexpr,
    PARTS: constexpr,
    NORM: constexpr,
):
    """Store the rotated rows of a program."""
    row = program * ROWS + tl.arange(0, ROWS)[:, None]
    inside = row < rows
    OUT: constexpr = out.ptr.dtype.element_ty
    parts = rotated(x, row, inside, sizes, weight_ptr, tables, eps, OUT, PARTS, NORM)
    store_parts(at(out, row, sizes), inside, parts, 1.0, PARTS, "", False)


@triton.jit(do_not_specialize=["q_rows", "k_rows", "q_programs"])
def _rope(
    q,
    k,
    q_weight_ptr,
    k_weight_ptr,
    tables,
    q_out,
    k_out,
    q_rows,
    k_rows,
    q_programs,
    q_sizes,
    k_sizes,
    eps,
    PARTS: constexpr,
    ROWS: constexpr,
    NORM: constexpr,
    PDL: constexpr,
):
    program = tl.program_id(0)
    begin(PDL)
    if program < q_programs:
        rotate(q, q_out, program, q_rows, q_sizes, q_weight_ptr, tables, eps, ROWS, PARTS, NORM)
    elif k is not None:
        program -= q_programs
        rotate(k, k_out, program, k_rows, k_sizes, k_weight_ptr, tables, eps, ROWS, PARTS, NORM)


def tables_of(cos: Tensor, sin: Tensor, x: Tensor) -> Tables:
    """Tables for the rows of x, with strides of zero where they are broadcast."""
    strides = [0] * (x.dim() - cos.dim())
    strides += [
        0 if size == 1 else step
        for size, step in zip(cos.shape[:-1], cos.stride()[:-1], strict=True)
    ]
    last = strides[-1] if x.dim() > 2 else 0
    return Tables(cos, sin, strides[0] if strides else 0, strides[1] if x.dim() > 3 else 0, last)


def head_parts(x: Tensor, cos: Tensor, style: str, in_fp32: bool = False) -> HeadParts:
    """The parts of a row of x."""
    half = cos.shape[-1] * columns_per_angle(style) // 2
    return HeadParts(style, x.shape[-1], half, x.shape[-1] - 2 * half, in_fp32)


def launch_arguments(
    x: Tensor, cos: Tensor, style: str, rows_a_program: int, in_fp32: bool = False
) -> dict[str, int | bool | HeadParts]:
    """Of kernels whose programs rotate so many rows each."""
    return {
        "PARTS": head_parts(x, cos, style, in_fp32),
        "ROWS": rows_a_program,
        # H200, qk_norm_rope_kv_write of 48 heads of 128, us with a warp per 1 / 2 / 4 rows: 1 token
        # 2.2 / 2.0 / 1.7, 64 tokens 2.4 / 2.2 / 2.0, 1,024 tokens 10.3 / 9.3 / 9.3, 65,536 tokens
        # 517 / 416 / 397.
        "num_warps": rows_a_program // 4,
        **overlap(x.device),
    }


def empty_rows(
    x: Tensor, cos: Tensor, style: str, weight: Tensor | None, norm: str, in_fp32: bool = False
) -> Tensor:
    """Empty rows for the normalized and rotated x. They are contiguous as in the reference, which
    concatenates unless full-width tables rotate whole rows.
    """
    normed = x.dtype if weight is None else normed_dtype(x, weight, norm)
    rotates_all = style in FULL_WIDTH_STYLES and cos.shape[-1] == x.shape[-1]
    return torch.empty_like(
        x,
        dtype=normed if in_fp32 else torch.promote_types(normed, cos.dtype),
        memory_format=torch.preserve_format if rotates_all else torch.contiguous_format,
    )


def refuse_rope(
    platform: Platform, x: Tensor, cos: Tensor, sin: Tensor, style: str
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
    in_fp32: bool = False,
) -> list[Tensor]:
    """The rotated q, and the rotated k if there is one."""
    outs = [empty_rows(x, cos, style, q_weight, norm, in_fp32) for x in (q, k) if x is not None]
    q_rows, k_rows = num_rows(q), 0 if k is None else num_rows(k)
    if q_rows + k_rows:
        rows_a_program = HEAD_ROWS.choose(q.device, q_rows + k_rows)
        q_programs = triton.cdiv(q_rows, rows_a_program)
        k_out = None if k is None else outs[1]
        _rope[(q_programs + triton.cdiv(k_rows, rows_a_program),)](
            *map(rows_of, (q, k)),
            q_weight,
            k_weight,
            tables_of(cos, sin, q),
            *map(rows_of, (outs[0], k_out)),
            q_rows,
            k_rows,
            q_programs,
            inner_sizes(q),
            None if k is None else inner_sizes(k),
            eps,
            NORM=norm,
            **launch_arguments(q, cos, style, rows_a_program, in_fp32),
        )
    return outs


@ops.rope.kernel("triton", refuses=refuse_rope, tuned_for=HEAD_ROWS.archs)
def rope(x: Tensor, cos: Tensor, sin: Tensor, style: str, in_fp32: bool) -> Tensor:
    [out] = _launch(x, None, None, None, cos, sin, 0.0, "", style, in_fp32)
    return out


def refuse_qk_norm_rope(
    platform: Platform,
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    rope_style: str,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    norm_style: str = "after",
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
    norm_style: str,
    rope_style: str,
) -> tuple[Tensor, Tensor]:
    q, k = _launch(q, k, q_weight, k_weight, cos, sin, eps, norm_style, rope_style)
    return q, k
