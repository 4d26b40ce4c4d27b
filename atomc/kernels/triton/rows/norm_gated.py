"""RMSNorm and its gate in Triton: both rows are read once, rounded where the reference rounds."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from atomc import ops
from atomc.kernels.checks import first_refusal, unlike_shapes
from atomc.kernels.triton.launch.launch import (
    begin,
    num_rows,
    overlap,
    row_layout,
    row_offset,
    unfit,
)
from atomc.kernels.triton.launch.tile_table import RowTile
from atomc.kernels.triton.launch.tiles import NORM_GATED
from atomc.kernels.triton.rows.norm import refuse_rms_norm, weighted
from atomc.ops.op import Refusal
from atomc.platform import Platform


@triton.jit(do_not_specialize=["rows"])
def _rms_norm_gated(
    x_ptr,
    gate_ptr,
    weight_ptr,
    out_ptr,
    rows,
    d1,
    d2,
    x0,
    x1,
    x2,
    g0,
    g1,
    g2,
    o0,
    o1,
    o2,
    eps,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    STYLE: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < D)
    begin(PDL)
    weight = tl.load(weight_ptr + column, column < D, 0.0)
    x = tl.load(x_ptr + row_offset(row, d1, d2, x0, x1, x2) + column, inside, 0.0)
    gate = tl.load(gate_ptr + row_offset(row, d1, d2, g0, g1, g2) + column, inside, 0.0)
    wide, gate = x.to(tl.float32), gate.to(tl.float32)
    y = wide * tl.rsqrt(tl.sum(wide * wide, 1)[:, None] / D + eps)
    y = weighted(y, weight.to(tl.float32), x.dtype, STYLE)
    # In the promoted dtype of both after weighting, and in that of x in the other styles.
    if weight.dtype != tl.float32 or STYLE != "after":
        y = y.to(x.dtype).to(tl.float32)
    y *= gate * tl.sigmoid(gate)
    at = out_ptr + row_offset(row, d1, d2, o0, o1, o2) + column
    tl.store(at, y.to(out_ptr.dtype.element_ty), inside)


def refuse_gate(platform: Platform, x: Tensor, gate: Tensor, **_: object) -> Refusal | None:
    return unfit(platform, gate=gate) or unlike_shapes(x, gate=gate)


refuse_rms_norm_gated = first_refusal(refuse_rms_norm, refuse_gate)


@ops.rms_norm_gated.kernel("triton", refuses=refuse_rms_norm_gated, tuned_for=NORM_GATED.archs)
def rms_norm_gated(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, style: str = "after"
) -> Tensor:
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
        x,
        gate,
        weight,
        out,
        rows,
        *row_layout(x, gate, out),
        eps,
        D=x.shape[-1],
        STYLE=style,
        **tile.launch(triton.next_power_of_2(x.shape[-1])),
        **overlap(x.device),
    )
