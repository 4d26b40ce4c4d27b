"""SiLU(gate) * up with a quantized result, in Triton: in one pass, or in two where that is faster.

Codes can differ from the reference where exp is rounded differently; tests allow this for few
codes, by one step.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from atomc import ops
from atomc.kernels.triton.launch.launch import (
    begin,
    num_rows,
    overlap,
    row_layout,
    row_offset,
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
from atomc.platform import Platform

# With one scale per row a program takes a whole row, and few rows leave most of the device idle.
# H200, rows of 12,288 to fp8, us in one pass / two: 16 rows 3.7 / 3.1, 1,024 rows 25.1 / 32.0.
PER_ROW, WIDE, FEW = ("fp8_per_token", "int8_per_token"), 8192, 64


@triton.jit(do_not_specialize=["rows"])
def _gated_quant(
    gate_ptr,
    up_ptr,
    codes_ptr,
    scales_ptr,
    static_ptr,
    rows,
    d1,
    d2,
    g0,
    g1,
    g2,
    u0,
    u1,
    u2,
    row_step,
    group_step,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    SCHEME: tl.constexpr,
    GROUP: tl.constexpr,
    FNUZ: tl.constexpr,
    BY_BITS: tl.constexpr,
    MX_BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    first = tl.program_id(1) * BLOCK
    column = first + tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < D)
    begin(PDL)
    gate = tl.load(gate_ptr + row_offset(row, d1, d2, g0, g1, g2) + column, inside, 0.0).to(
        tl.float32
    )
    up = tl.load(up_ptr + row_offset(row, d1, d2, u0, u1, u2) + column, inside, 0.0).to(tl.float32)
    DTYPE: tl.constexpr = gate_ptr.dtype.element_ty
    y = (silu(gate, DTYPE).to(DTYPE).to(tl.float32) * up).to(DTYPE)
    store_quantized(
        y,
        codes_ptr,
        scales_ptr,
        static_ptr,
        row,
        first,
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


def _tile(out: Quantized, rows: int, columns: int) -> dict[str, int]:
    tile = out.tile(rows, columns)
    if out.whole_rows:
        warps = GATED_QUANT_WARPS.choose(out.codes.device, rows, tile["BLOCK"])
        return tile | {"num_warps": min(warps, MAX_WARPS)}
    if columns > 1024 and columns % 2048 and out.group <= 1024 <= rows:
        # The last block of 2,048 would be mostly empty. H200, rows of 3,072, us with blocks of
        # 2,048 / 1,024: 1,024 rows to mxfp4 8.1 / 6.4, 8,192 rows 46.6 / 37.9; to fp8_group 6.3 /
        # 5.7, 34.2 / 32.5.
        return {"BLOCK": 1024, "ROWS": 2, "num_warps": 8}
    return tile


def refuse_silu_and_mul_quant(
    platform: Platform,
    gate: Tensor,
    up: Tensor,
    *,
    scheme: str,
    dtype: torch.dtype = torch.float8_e4m3fn,
    group: int = 128,
    rounding: str = "even",
    **_: object,
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
    gate: Tensor,
    up: Tensor,
    scale: Tensor | None = None,
    *,
    scheme: str,
    dtype: torch.dtype = torch.float8_e4m3fn,
    group: int = 128,
    column_major: bool = False,
    rounding: str = "even",
) -> tuple[Tensor, Tensor]:
    if scheme in PER_ROW and gate.shape[-1] > WIDE and num_rows(gate) <= FEW:
        y = silu_and_mul(gate, up)
        int8 = scheme == "int8_per_token"
        return quant_int8_per_token(y) if int8 else quant_fp8_per_token(y, dtype)
    out = Quantized(gate, scale, scheme, dtype, group, column_major, rounding)
    if rows := num_rows(gate):
        tile = _tile(out, rows, gate.shape[-1])
        _gated_quant[(triton.cdiv(rows, tile["ROWS"]), triton.cdiv(gate.shape[-1], tile["BLOCK"]))](
            gate,
            up,
            *out.pointers,
            rows,
            *row_layout(gate, up),
            *out.steps,
            D=gate.shape[-1],
            **out.constants,
            **tile,
            **overlap(gate.device),
        )
    return out.codes, out.scales
