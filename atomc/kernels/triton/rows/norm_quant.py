"""RMSNorm with a quantized result, in Triton: a row is read once and stays in registers.

The order in which squares are added can move a value across the border between two codes; tests
allow this for few codes, by one step.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from atomc import ops
from atomc.kernels.checks import first_refusal
from atomc.kernels.triton.launch.launch import (
    TRITON_DTYPE,
    begin,
    num_rows,
    overlap,
    register_limit,
    row_layout,
    row_offset,
)
from atomc.kernels.triton.launch.tiles import NORM
from atomc.kernels.triton.rows.norm import (
    normed_dtype,
    refuse_rms_norm,
    row_sum,
    tile_for,
    weighted,
)
from atomc.kernels.triton.rows.quant import Quantized, store_quantized, unquantizable


@triton.jit
def store_norm(
    x,
    weight,
    kept_at,
    codes_ptr,
    scales_ptr,
    static_ptr,
    row,
    rows,
    row_step,
    group_step,
    eps,
    DTYPE: tl.constexpr,
    NORMED: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    STYLE: tl.constexpr,
    KEEP: tl.constexpr,
    SCHEME: tl.constexpr,
    GROUP: tl.constexpr,
    FNUZ: tl.constexpr,
    BY_BITS: tl.constexpr,
    MX_BIAS: tl.constexpr,
):
    """Store the norm of x in dtype NORMED if KEEP, and its codes and scales; SCHEME "": no codes.

    x and weight [ROWS or 1, BLOCK] in fp32, padded by zeros; DTYPE is the dtype of x in memory.
    """
    y = x * tl.rsqrt(tl.sum(x * x, 1)[:, None] / D + eps)
    y = weighted(y, weight, DTYPE, STYLE).to(NORMED)
    if KEEP:
        tl.store(kept_at, y, (row < rows) & (tl.arange(0, BLOCK)[None, :] < D))
    if SCHEME != "":
        store_quantized(
            y,
            codes_ptr,
            scales_ptr,
            static_ptr,
            row,
            0,
            rows,
            D,
            row_step,
            group_step,
            ROWS,
            BLOCK,
            SCHEME,
            GROUP,
            FNUZ,
            BY_BITS,
            MX_BIAS,
        )


@triton.jit(do_not_specialize=["rows"])
def _norm_quant(
    x_ptr,
    residual_ptr,
    weight_ptr,
    codes_ptr,
    scales_ptr,
    static_ptr,
    sum_ptr,
    kept_ptr,
    rows,
    d1,
    d2,
    x0,
    x1,
    x2,
    r0,
    r1,
    r2,
    s0,
    s1,
    s2,
    k0,
    k1,
    k2,
    row_step,
    group_step,
    eps,
    NORMED: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    STYLE: tl.constexpr,
    ADD: tl.constexpr,
    KEEP: tl.constexpr,
    SCHEME: tl.constexpr,
    GROUP: tl.constexpr,
    FNUZ: tl.constexpr,
    BY_BITS: tl.constexpr,
    MX_BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < D)
    begin(PDL)
    weight = tl.load(weight_ptr + column, column < D, 0.0).to(tl.float32)
    x = row_sum(
        x_ptr,
        residual_ptr,
        sum_ptr,
        row_offset(row, d1, d2, x0, x1, x2) + column,
        row_offset(row, d1, d2, r0, r1, r2) + column,
        row_offset(row, d1, d2, s0, s1, s2) + column,
        inside,
        ADD,
    )
    store_norm(
        x,
        weight,
        kept_ptr + row_offset(row, d1, d2, k0, k1, k2) + column,
        codes_ptr,
        scales_ptr,
        static_ptr,
        row,
        rows,
        row_step,
        group_step,
        eps,
        x_ptr.dtype.element_ty,
        NORMED,
        D,
        BLOCK,
        ROWS,
        STYLE,
        KEEP,
        SCHEME,
        GROUP,
        FNUZ,
        BY_BITS,
        MX_BIAS,
    )


def quantized_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    scale: Tensor | None,
    style: str,
    scheme: str,
    dtype: torch.dtype,
    group: int,
    column_major: bool,
    rounding: str,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """add_rms_norm_quant; without a residual, the sum is x."""
    normed = normed_dtype(x, weight, style)
    out = Quantized(x, scale, scheme, dtype, group, column_major, rounding)
    total = None if residual is None else torch.empty_like(x)
    kept = torch.empty_like(x, dtype=normed) if keep else x.new_empty(0, dtype=normed)
    if rows := num_rows(x):
        cut = tile_for(x, x.shape[-1])
        cut["BLOCK"] = max(cut["BLOCK"], out.group)
        _norm_quant[(triton.cdiv(rows, cut["ROWS"]),)](
            x,
            residual,
            weight,
            *out.pointers,
            total,
            kept,
            rows,
            *row_layout(x, residual, total, kept if keep else None),
            *out.steps,
            eps,
            NORMED=TRITON_DTYPE[normed],
            D=x.shape[-1],
            STYLE=style,
            ADD=residual is not None,
            KEEP=keep,
            **out.constants,
            **cut,
            **overlap(x.device),
            **register_limit(x.device),
        )
    return out.codes, out.scales, x if total is None else total, kept


refuse_rms_norm_quant = first_refusal(unquantizable, refuse_rms_norm)


@ops.rms_norm_quant.kernel("triton", refuses=refuse_rms_norm_quant, tuned_for=NORM.archs)
def rms_norm_quant(
    x: Tensor,
    weight: Tensor,
    eps: float,
    scale: Tensor | None = None,
    style: str = "after",
    *,
    scheme: str,
    dtype: torch.dtype = torch.float8_e4m3fn,
    group: int = 128,
    column_major: bool = False,
    rounding: str = "even",
    keep: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    codes, scales, _, y = quantized_norm(
        x, None, weight, eps, scale, style, scheme, dtype, group, column_major, rounding, keep
    )
    return codes, scales, y


@ops.add_rms_norm_quant.kernel("triton", refuses=refuse_rms_norm_quant, tuned_for=NORM.archs)
def add_rms_norm_quant(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    scale: Tensor | None = None,
    style: str = "after",
    *,
    scheme: str,
    dtype: torch.dtype = torch.float8_e4m3fn,
    group: int = 128,
    column_major: bool = False,
    rounding: str = "even",
    keep: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return quantized_norm(
        x, residual, weight, eps, scale, style, scheme, dtype, group, column_major, rounding, keep
    )
