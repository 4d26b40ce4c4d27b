"""RMSNorm and its gate in Triton: both rows are read once, rounded where the reference rounds."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from atomc import ops
from atomc.kernels.checks import first_refusal, named, unlike_shapes
from atomc.kernels.triton.launch.launch import (
    begin,
    inner_sizes,
    load_rows,
    num_rows,
    overlap,
    row_tile,
    rows_of,
    store_rows,
    unfit,
)
from atomc.kernels.triton.launch.tile_table import RowTile
from atomc.kernels.triton.launch.tiles import NORM_GATED
from atomc.kernels.triton.rows.norm import normed, refuse_rms_norm


@triton.jit(do_not_specialize=["rows"])
def _rms_norm_gated(
    x,
    gate,
    out,
    weight_ptr,
    rows,
    sizes,
    eps,
    D: constexpr,
    BLOCK: constexpr,
    ROWS: constexpr,
    STYLE: constexpr,
    PDL: constexpr,
):
    row, column, inside = row_tile(rows, D, 0, ROWS, BLOCK)
    DTYPE: constexpr = x.ptr.dtype.element_ty
    begin(PDL)
    weight = tl.load(weight_ptr + column, column < D, 0.0)
    x = load_rows(x, row, column, sizes, inside)
    gate = load_rows(gate, row, column, sizes, inside)
    y = normed(x, weight.to(tl.float32), eps, D, DTYPE, STYLE)
    # In the promoted dtype of both after weighting, and in that of x in the other styles.
    if weight.dtype != tl.float32 or STYLE != "after":
        y = y.to(DTYPE).to(tl.float32)
    store_rows(out, row, column, sizes, y * (gate * tl.sigmoid(gate)), inside)


refuse_rms_norm_gated = first_refusal(
    refuse_rms_norm, named("platform gate", unfit), named("x gate", unlike_shapes)
)


@ops.rms_norm_gated.kernel("triton", refuses=refuse_rms_norm_gated, tuned_for=NORM_GATED.archs)
def rms_norm_gated(x: Tensor, gate: Tensor, weight: Tensor, eps: float, style: str) -> Tensor:
    out = torch.empty_like(x)
    if rows := num_rows(out):
        block = triton.next_power_of_2(x.shape[-1])
        launch(x, gate, weight, out, eps, style, NORM_GATED.choose(x.device, rows, block))
    return out


def launch(
    x: Tensor, gate: Tensor, weight: Tensor, out: Tensor, eps: float, style: str, tile: RowTile
) -> None:
    """Fill `out`, which has rows, with this tile."""
    rows = num_rows(out)
    _rms_norm_gated[(triton.cdiv(rows, tile.rows),)](
        *map(rows_of, (x, gate, out)),
        weight,
        rows,
        inner_sizes(x),
        eps,
        D=x.shape[-1],
        STYLE=style,
        **tile.launch(triton.next_power_of_2(x.shape[-1])),
        **overlap(x.device),
    )
