"""Two RMSNorms of tensors with the same rows in one Triton kernel, alone and with quantized
results. A program takes rows of one of the two.
"""

from typing import Unpack

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from atomc import ops
from atomc.graph.sizes import known_equal, spell_shape
from atomc.kernels.checks import first_refusal, too_wide, unknown
from atomc.kernels.triton.launch.launch import (
    begin,
    inner_sizes,
    num_rows,
    overlap,
    register_limit,
    unfit,
)
from atomc.kernels.triton.launch.tiles import NORM
from atomc.kernels.triton.rows.norm import MAX_COLUMNS
from atomc.kernels.triton.rows.norm_quant import RowNorm, quantize_norm
from atomc.kernels.triton.rows.quant import Quantized, unquantizable
from atomc.ops.norm import RMS_NORM_STYLES
from atomc.ops.op import Refusal
from atomc.ops.schemes import SchemeArguments
from atomc.platform import Platform


@triton.jit(do_not_specialize=["rows"])
def _norm_pair(
    x,
    y,
    rows,
    sizes,
    eps,
    X: constexpr,
    Y: constexpr,
    ROWS: constexpr,
    STYLE: constexpr,
    PDL: constexpr,
):
    begin(PDL)
    # Triton 3.6 forgets constants in tuples of tuples after a branch.
    y, _, _, y_weight_ptr, y_kept, y_out = y
    if tl.program_id(1) == 0:
        quantize_norm(*x, rows, sizes, eps, X, ROWS, STYLE)
    else:
        quantize_norm(y, None, None, y_weight_ptr, y_kept, y_out, rows, sizes, eps, Y, ROWS, STYLE)


def _launch(like: Tensor, x: RowNorm, y: RowNorm, eps: float, style: str) -> None:
    """like: x"""
    if not (rows := num_rows(like)):
        return
    block = x.constants.block
    tile = NORM.choose(like.device, rows, max(block, y.constants.block))
    _norm_pair[(triton.cdiv(rows, tile.rows), 2)](
        x.operands,
        y.operands,
        rows,
        inner_sizes(like),
        eps,
        X=x.constants,
        Y=y.constants,
        ROWS=tile.rows,
        STYLE=style,
        num_warps=tile.launch(block)["num_warps"],
        **overlap(like.device),
        **register_limit(like.device),
    )


def refuse_rms_norm_pair(
    platform: Platform, x: Tensor, y: Tensor, x_weight: Tensor, y_weight: Tensor, style: str
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
    x: Tensor, y: Tensor, x_weight: Tensor, y_weight: Tensor, eps: float, style: str
) -> tuple[Tensor, Tensor]:
    of_x = RowNorm(x, None, x_weight, style, None, True)
    of_y = RowNorm(y, None, y_weight, style, None, True)
    _launch(x, of_x, of_y, eps, style)
    return of_x.norm, of_y.norm


def refuse_quant_of_y(
    platform: Platform,
    y: Tensor,
    scheme: str,
    dtype: torch.dtype,
    group: int,
    rounding: str,
    quantize_y: bool,
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
    x_scale: Tensor | None,
    y_scale: Tensor | None,
    style: str,
    quantize_y: bool,
    keep_x: bool,
    keep_y: bool,
    **scheme: Unpack[SchemeArguments],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    of_x = Quantized(x, x_scale, **scheme)
    of_y = None
    y_codes = y.new_empty(0), y.new_empty(0)
    if quantize_y:
        of_y = Quantized(y, y_scale, **scheme)
        y_codes = of_y.codes, of_y.scales
    x_norm = RowNorm(x, None, x_weight, style, of_x, keep_x)
    y_norm = RowNorm(y, None, y_weight, style, of_y, keep_y or not quantize_y)
    _launch(x, x_norm, y_norm, eps, style)
    return of_x.codes, of_x.scales, *y_codes, x_norm.norm, y_norm.norm
