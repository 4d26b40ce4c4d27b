"""Two RMSNorms of tensors with the same rows in one Triton kernel, alone and with quantized
results. A program takes rows of one of the two.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from atomc import ops
from atomc.graph.sizes import known_equal, spell_shape
from atomc.kernels.checks import first_refusal, too_wide, unknown
from atomc.kernels.triton.launch.launch import (
    TRITON_DTYPE,
    begin,
    inner_sizes,
    num_rows,
    overlap,
    register_limit,
    row_offset,
    row_strides,
    unfit,
)
from atomc.kernels.triton.launch.tiles import NORM
from atomc.kernels.triton.rows.norm import MAX_COLUMNS, normed_dtype
from atomc.kernels.triton.rows.norm_quant import store_norm
from atomc.kernels.triton.rows.quant import Quantized, unquantizable
from atomc.ops.norm import RMS_NORM_STYLES
from atomc.ops.op import Refusal
from atomc.platform import Platform


@triton.jit
def _rows_of_one(
    x_ptr,
    weight_ptr,
    norm_ptr,
    codes_ptr,
    scales_ptr,
    static_ptr,
    rows,
    d1,
    d2,
    x0,
    x1,
    x2,
    n0,
    n1,
    n2,
    row_step,
    group_step,
    eps,
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
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < D)
    weight = tl.load(weight_ptr + column, column < D, 0.0).to(tl.float32)
    x = tl.load(x_ptr + row_offset(row, d1, d2, x0, x1, x2) + column, inside, 0.0).to(tl.float32)
    store_norm(
        x,
        weight,
        norm_ptr + row_offset(row, d1, d2, n0, n1, n2) + column,
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


@triton.jit(do_not_specialize=["rows"])
def _norm_pair(
    x_ptr,
    x_weight_ptr,
    x_norm_ptr,
    x_codes_ptr,
    x_scales_ptr,
    x_static_ptr,
    x0,
    x1,
    x2,
    xn0,
    xn1,
    xn2,
    x_row_step,
    x_group_step,
    y_ptr,
    y_weight_ptr,
    y_norm_ptr,
    y_codes_ptr,
    y_scales_ptr,
    y_static_ptr,
    y0,
    y1,
    y2,
    yn0,
    yn1,
    yn2,
    y_row_step,
    y_group_step,
    rows,
    d1,
    d2,
    eps,
    X_NORMED: tl.constexpr,
    X_D: tl.constexpr,
    X_BLOCK: tl.constexpr,
    X_KEEP: tl.constexpr,
    X_SCHEME: tl.constexpr,
    Y_NORMED: tl.constexpr,
    Y_D: tl.constexpr,
    Y_BLOCK: tl.constexpr,
    Y_KEEP: tl.constexpr,
    Y_SCHEME: tl.constexpr,
    ROWS: tl.constexpr,
    STYLE: tl.constexpr,
    GROUP: tl.constexpr,
    FNUZ: tl.constexpr,
    BY_BITS: tl.constexpr,
    MX_BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    if tl.program_id(1) == 0:
        _rows_of_one(
            x_ptr,
            x_weight_ptr,
            x_norm_ptr,
            x_codes_ptr,
            x_scales_ptr,
            x_static_ptr,
            rows,
            d1,
            d2,
            x0,
            x1,
            x2,
            xn0,
            xn1,
            xn2,
            x_row_step,
            x_group_step,
            eps,
            X_NORMED,
            X_D,
            X_BLOCK,
            ROWS,
            STYLE,
            X_KEEP,
            X_SCHEME,
            GROUP,
            FNUZ,
            BY_BITS,
            MX_BIAS,
        )
    else:
        _rows_of_one(
            y_ptr,
            y_weight_ptr,
            y_norm_ptr,
            y_codes_ptr,
            y_scales_ptr,
            y_static_ptr,
            rows,
            d1,
            d2,
            y0,
            y1,
            y2,
            yn0,
            yn1,
            yn2,
            y_row_step,
            y_group_step,
            eps,
            Y_NORMED,
            Y_D,
            Y_BLOCK,
            ROWS,
            STYLE,
            Y_KEEP,
            Y_SCHEME,
            GROUP,
            FNUZ,
            BY_BITS,
            MX_BIAS,
        )


@dataclass
class _One:
    """One of the two norms, and its results.

    norm       [0] unless `keep`
    quantized  None: only the norm is stored
    """

    x: Tensor
    weight: Tensor
    style: str
    quantized: Quantized | None = None
    keep: bool = True

    def __post_init__(self) -> None:
        dtype = normed_dtype(self.x, self.weight, self.style)
        self.norm = (
            torch.empty_like(self.x, dtype=dtype) if self.keep else self.x.new_empty(0, dtype=dtype)
        )

    @property
    def arguments(self) -> tuple[object, ...]:
        """In the order of the kernel's parameters."""
        pointers: tuple[object, ...] = (None, None, None)
        steps = (0, 0)
        if self.quantized is not None:
            pointers, steps = self.quantized.pointers, self.quantized.steps
        strides = row_strides(self.norm) if self.keep else (0, 0, 0)
        return self.x, self.weight, self.norm, *pointers, *row_strides(self.x), *strides, *steps

    def constants(self, prefix: str) -> dict[str, object]:
        width, quantized = self.x.shape[-1], self.quantized
        return {
            f"{prefix}_NORMED": TRITON_DTYPE[self.norm.dtype],
            f"{prefix}_D": width,
            f"{prefix}_BLOCK": self.block,
            f"{prefix}_KEEP": self.keep,
            f"{prefix}_SCHEME": "" if quantized is None else quantized.constants["SCHEME"],
        }

    @property
    def block(self) -> int:
        width: int = triton.next_power_of_2(self.x.shape[-1])
        return width if self.quantized is None else max(width, self.quantized.group)


# What a launch has in place of Quantized.constants if neither result is quantized.
_UNQUANTIZED = {"GROUP": 1, "FNUZ": False, "BY_BITS": False, "MX_BIAS": 0}


def _launch(x: _One, y: _One, eps: float) -> None:
    if not (rows := num_rows(x.x)):
        return
    tile = NORM.choose(x.x.device, rows, max(x.block, y.block))
    of_scheme = _UNQUANTIZED if x.quantized is None else x.quantized.constants
    _norm_pair[(triton.cdiv(rows, tile.rows), 2)](
        *x.arguments,
        *y.arguments,
        rows,
        *inner_sizes(x.x),
        eps,
        **x.constants("X"),
        **y.constants("Y"),
        ROWS=tile.rows,
        STYLE=x.style,
        **{name: of_scheme[name] for name in _UNQUANTIZED},
        num_warps=tile.launch(x.block)["num_warps"],
        **overlap(x.x.device),
        **register_limit(x.x.device),
    )


def refuse_rms_norm_pair(
    platform: Platform,
    x: Tensor,
    y: Tensor,
    x_weight: Tensor,
    y_weight: Tensor,
    style: str = "after",
    **_: object,
) -> Refusal | None:
    if x.dim() != y.dim() or not all(map(known_equal, x.shape[:-1], y.shape[:-1])):
        return Refusal(
            "shape", f"x {spell_shape(x.shape)} and y {spell_shape(y.shape)} have other rows"
        )
    return (
        unknown(RMS_NORM_STYLES, style=style)
        or unfit(platform, x=x, y=y, x_weight=x_weight, y_weight=y_weight)
        or too_wide(max(x.shape[-1], y.shape[-1]), MAX_COLUMNS)
    )


@ops.rms_norm_pair.kernel("triton", refuses=refuse_rms_norm_pair, tuned_for=NORM.archs)
def rms_norm_pair(
    x: Tensor, y: Tensor, x_weight: Tensor, y_weight: Tensor, eps: float, style: str = "after"
) -> tuple[Tensor, Tensor]:
    both = _One(x, x_weight, style), _One(y, y_weight, style)
    _launch(*both, eps)
    return both[0].norm, both[1].norm


def refuse_quant_of_y(
    platform: Platform,
    y: Tensor,
    *,
    scheme: str,
    dtype: torch.dtype = torch.float8_e4m3fn,
    group: int = 128,
    rounding: str = "even",
    quantize_y: bool = True,
    **_: object,
) -> Refusal | None:
    if not quantize_y:
        return None
    return unquantizable(platform, y, scheme, dtype, group, rounding, "y")


refuse_rms_norm_pair_quant = first_refusal(unquantizable, refuse_quant_of_y, refuse_rms_norm_pair)


@ops.rms_norm_pair_quant.kernel("triton", refuses=refuse_rms_norm_pair_quant, tuned_for=NORM.archs)
def rms_norm_pair_quant(
    x: Tensor,
    y: Tensor,
    x_weight: Tensor,
    y_weight: Tensor,
    eps: float,
    x_scale: Tensor | None = None,
    y_scale: Tensor | None = None,
    style: str = "after",
    *,
    scheme: str,
    dtype: torch.dtype = torch.float8_e4m3fn,
    group: int = 128,
    column_major: bool = False,
    rounding: str = "even",
    quantize_y: bool = True,
    keep_x: bool = False,
    keep_y: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    of_x = Quantized(x, x_scale, scheme, dtype, group, column_major, rounding)
    of_y = None
    y_codes = y.new_empty(0), y.new_empty(0)
    if quantize_y:
        of_y = Quantized(y, y_scale, scheme, dtype, group, column_major, rounding)
        y_codes = of_y.codes, of_y.scales
    x_one = _One(x, x_weight, style, of_x, keep_x)
    y_one = _One(y, y_weight, style, of_y, keep_y or not quantize_y)
    _launch(x_one, y_one, eps)
    return of_x.codes, of_x.scales, *y_codes, x_one.norm, y_one.norm
