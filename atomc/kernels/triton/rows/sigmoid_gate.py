"""Gates by a sigmoid in Triton, with the sum behind them: strided operands are read in place."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from atomc import ops
from atomc.kernels.checks import unlike, unlike_shapes
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
from atomc.kernels.triton.launch.tiles import GATED
from atomc.kernels.triton.rows.activation import gated_tile
from atomc.ops.formats import FLOATS
from atomc.ops.op import Refusal
from atomc.platform import Platform


@triton.jit(do_not_specialize=["rows"])
def _sigmoid_gated(
    gate,
    up,
    added,
    out,
    rows,
    sizes,
    WIDTH: constexpr,
    BLOCK: constexpr,
    ROWS: constexpr,
    ONE_GATE: constexpr,
    PDL: constexpr,
):
    """ONE_GATE: a row has one gate."""
    DTYPE: constexpr = out.ptr.dtype.element_ty
    row, column, inside = row_tile(rows, WIDTH, tl.program_id(1) * BLOCK, ROWS, BLOCK)
    begin(PDL)
    if ONE_GATE:
        gate = load_rows(gate, row, 0, sizes, row < rows)
    else:
        gate = load_rows(gate, row, column, sizes, inside)
    value = tl.sigmoid(gate).to(DTYPE).to(tl.float32) * load_rows(up, row, column, sizes, inside)
    if added is not None:
        value = value.to(DTYPE).to(tl.float32) + load_rows(added, row, column, sizes, inside)
    store_rows(out, row, column, sizes, value, inside)


def refuse_sigmoid_and_mul(
    platform: Platform, gate: Tensor, up: Tensor, added: Tensor | None
) -> Refusal | None:
    return (
        unfit(platform, gate=gate, up=up, added=added)
        or unlike(FLOATS, gate=gate, up=up, added=added)
        or unlike_shapes(up, added=added)
        or unlike_shapes(up[..., :1] if gate.shape[-1] == 1 else up, gate=gate)
    )


@ops.sigmoid_and_mul.kernel("triton", refuses=refuse_sigmoid_and_mul, tuned_for=GATED.archs)
def sigmoid_and_mul(gate: Tensor, up: Tensor, added: Tensor | None) -> Tensor:
    # PyTorch's result has the order of the dimensions of the first operand.
    first = gate.expand_as(up) if added is None else added
    out = torch.empty_like(first)
    if rows := num_rows(out):
        width = up.shape[-1]
        tile = gated_tile(rows, width, up.device)
        _sigmoid_gated[(triton.cdiv(rows, tile["ROWS"]), triton.cdiv(width, tile["BLOCK"]))](
            *map(rows_of, (gate, up, added, out)),
            rows,
            inner_sizes(up),
            WIDTH=width,
            ONE_GATE=gate.shape[-1] == 1,
            **tile,
            **overlap(up.device),
        )
    return out
