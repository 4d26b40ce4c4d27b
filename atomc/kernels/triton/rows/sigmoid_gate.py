"""Gates by a sigmoid in Triton, with the sum behind them: strided operands are read in place."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from atomc import ops
from atomc.kernels.checks import unlike, unlike_shapes
from atomc.kernels.triton.launch.launch import (
    begin,
    inner_sizes,
    num_rows,
    overlap,
    row_offset,
    row_strides,
    unfit,
)
from atomc.kernels.triton.launch.tiles import GATED
from atomc.ops.formats import FLOATS
from atomc.ops.op import Refusal
from atomc.platform import Platform


@triton.jit(do_not_specialize=["rows"])
def _sigmoid_gated(
    gate_ptr,
    up_ptr,
    added_ptr,
    out_ptr,
    rows,
    d1,
    d2,
    g0,
    g1,
    g2,
    u0,
    u1,
    u2,
    a0,
    a1,
    a2,
    o0,
    o1,
    o2,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ONE_GATE: tl.constexpr,
    PDL: tl.constexpr,
):
    """ROWS, COLUMNS: the tile of a program. ONE_GATE: a row has one gate."""
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (row < rows) & (column < WIDTH)
    begin(PDL)
    gate_at = gate_ptr + row_offset(row, d1, d2, g0, g1, g2)
    if ONE_GATE:
        gate = tl.load(gate_at, row < rows, 0.0).to(tl.float32)
    else:
        gate = tl.load(gate_at + column, inside, 0.0).to(tl.float32)
    up = tl.load(up_ptr + row_offset(row, d1, d2, u0, u1, u2) + column, inside).to(tl.float32)
    out = tl.sigmoid(gate).to(DTYPE).to(tl.float32) * up
    if added_ptr is not None:
        added_at = added_ptr + row_offset(row, d1, d2, a0, a1, a2) + column
        out = out.to(DTYPE).to(tl.float32) + tl.load(added_at, inside).to(tl.float32)
    tl.store(out_ptr + row_offset(row, d1, d2, o0, o1, o2) + column, out.to(DTYPE), inside)


def refuse_sigmoid_and_mul(
    platform: Platform, gate: Tensor, up: Tensor, added: Tensor | None = None
) -> Refusal | None:
    return (
        unfit(platform, gate=gate, up=up, added=added)
        or unlike(FLOATS, gate=gate, up=up, added=added)
        or unlike_shapes(up, added=added)
        or unlike_shapes(up[..., :1] if gate.shape[-1] == 1 else up, gate=gate)
    )


@ops.sigmoid_and_mul.kernel("triton", refuses=refuse_sigmoid_and_mul, tuned_for=GATED.archs)
def sigmoid_and_mul(gate: Tensor, up: Tensor, added: Tensor | None = None) -> Tensor:
    # PyTorch's result has the order of the dimensions of the first operand.
    first = gate.expand_as(up) if added is None else added
    out = torch.empty_like(first)
    if rows := num_rows(out):
        tile, width = GATED.choose(up.device, rows), up.shape[-1]
        columns = min(tile["BLOCK"], triton.next_power_of_2(width))
        together = tile["BLOCK"] // columns  # rows, such as of heads, that are short
        _sigmoid_gated[(triton.cdiv(rows, together), triton.cdiv(width, columns))](
            gate,
            up,
            added,
            out,
            rows,
            *inner_sizes(up),
            *row_strides(gate),
            *row_strides(up),
            *row_strides(first),
            *row_strides(out),
            WIDTH=width,
            ROWS=together,
            COLUMNS=columns,
            ONE_GATE=gate.shape[-1] == 1,
            num_warps=tile["num_warps"],
            **overlap(up.device),
        )
    return out
