"""SiLU(gate) * up with a quantized result, in Triton: in one pass, or in two where that is faster.

Codes can differ from the reference where exp is rounded differently; tests allow this for few
codes, by one step.
"""

from typing import Unpack

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from atomc import ops
from atomc.kernels.triton.launch.launch import (
    begin,
    inner_sizes,
    load_rows,
    num_rows,
    overlap,
    row_tile,
    rows_of,
    unfit,
)
from atomc.kernels.triton.launch.tile_table import MAX_WARPS
from atomc.kernels.triton.launch.tiles import GATED_QUANT_WARPS
from atomc.kernels.triton.rows.activation import silu, silu_and_mul, unlike_gate
from atomc.kernels.triton.rows.quant import (
    Quantized,
    quant_fp8_per_token,
    quant_int8_per_token,
    store_quantized,
    unquantizable,
)
from atomc.ops.op import Refusal
from atomc.ops.schemes import SchemeArguments
from atomc.platform import Platform

# With one scale per row a program takes a whole row, and few rows leave most of the device idle.
# H200, rows of 12,288 to fp8, us in one pass / two: 16 rows 3.7 / 3.1, 1,024 rows 25.1 / 32.0.
PER_ROW, WIDE, FEW = ("fp8_per_token", "int8_per_token"), 8192, 64


@triton.jit(do_not_specialize=["rows"])
def _gated_quant(
    gate,
    up,
    out,
    rows,
    sizes,
    D: constexpr,
    BLOCK: constexpr,
    ROWS: constexpr,
    CODING: constexpr,
    PDL: constexpr,
):
    first = tl.program_id(1) * BLOCK
    row, column, inside = row_tile(rows, D, first, ROWS, BLOCK)
    DTYPE: constexpr = gate.ptr.dtype.element_ty
    begin(PDL)
    gate = load_rows(gate, row, column, sizes, inside)
    up = load_rows(up, row, column, sizes, inside)
    y = (silu(gate, DTYPE).to(DTYPE).to(tl.float32) * up).to(DTYPE)
    store_quantized(y, out, row, first, rows, D, CODING)


def _tile(out: Quantized, rows: int, columns: int) -> dict[str, int]:
    tile = out.tile(rows, columns)
    if out.whole_rows:
        warps = GATED_QUANT_WARPS.choose(out.codes.device, rows, tile["BLOCK"])
        return tile | {"num_warps": min(warps, MAX_WARPS)}
    if columns > 1024 and columns % 2048 and out.group <= 256 and rows >= 1024:
        # The last block of 2,048 would be mostly empty. H200, 8,192 rows, us with two rows of 1,024
        # / eight of 256: of 1,152 columns to mxfp4 23.8 / 15.4, to fp8_group 18.3 / 12.4, of 3,072
        # 36.4 / 36.7, 31.1 / 31.0.
        return {"BLOCK": 256, "ROWS": 8, "num_warps": 8}
    return tile


def refuse_silu_and_mul_quant(
    platform: Platform,
    gate: Tensor,
    up: Tensor,
    scheme: str,
    dtype: torch.dtype,
    group: int,
    rounding: str,
) -> Refusal | None:
    return (
        unquantizable(platform, gate, scheme, dtype, group, rounding, "gate")
        or unfit(platform, up=up)
        or unlike_gate(gate, up)
    )


@ops.silu_and_mul_quant.kernel(
    "triton", refuses=refuse_silu_and_mul_quant, tuned_for=GATED_QUANT_WARPS.archs
)
def silu_and_mul_quant(
    gate: Tensor, up: Tensor, scale: Tensor | None, **how: Unpack[SchemeArguments]
) -> tuple[Tensor, Tensor]:
    scheme = how["scheme"]
    if scheme in PER_ROW and gate.shape[-1] > WIDE and num_rows(gate) <= FEW:
        y = silu_and_mul(gate, up)
        int8 = scheme == "int8_per_token"
        return quant_int8_per_token(y) if int8 else quant_fp8_per_token(y, how["dtype"])
    out = Quantized(gate, scale, **how)
    if rows := num_rows(gate):
        tile = _tile(out, rows, gate.shape[-1])
        _gated_quant[(triton.cdiv(rows, tile["ROWS"]), triton.cdiv(gate.shape[-1], tile["BLOCK"]))](
            *map(rows_of, (gate, up)),
            out.into,
            rows,
            inner_sizes(gate),
            D=gate.shape[-1],
            CODING=out.coding,
            **tile,
            **overlap(gate.device),
        )
    return out.codes, out.scales
