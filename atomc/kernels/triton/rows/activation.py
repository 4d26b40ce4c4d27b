"""Gated activations in Triton: strided gate and up are read in place, in one pass."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from atomc import ops
from atomc.kernels.checks import unknown, unlike, unlike_shapes
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
from atomc.ops.formats import FLOATS
from atomc.ops.op import Refusal
from atomc.platform import Platform


@triton.jit
def silu(x, DTYPE: constexpr):
    """x / (1 + exp(-x)) of x in fp32. For a 16-bit DTYPE accurate to about 2^-21, by a reciprocal
    square root, which takes six instructions less than a division.
    """
    if tl.float32 == DTYPE:
        return x * tl.sigmoid(x)
    else:
        root = tl.rsqrt(1.0 + tl.exp(-x))
        return x * root * root


@triton.jit
def gelu(x, DTYPE: constexpr):
    """x * (1 + erf(x / sqrt(2))) / 2 of x in fp32. For a 16-bit DTYPE 1 - erf of the magnitude is a
    polynomial times exp (Abramowitz and Stegun, 7.1.26, accurate to 1.5e-7), which takes half as
    many instructions.
    """
    if tl.float32 == DTYPE:
        return x * 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        root = tl.rsqrt(1.0 + 0.2316418882 * tl.abs(x))  # 0.3275911 / sqrt(2)
        t = root * root
        # Half of the published coefficients.
        tail = t * 0.5307027145 - 0.7265760135
        tail = tail * t + 0.7107068705
        tail = tail * t - 0.142248368
        tail = (tail * t + 0.127414796) * t * tl.exp2(-0.7213475204444817 * x * x)  # exp(-x^2 / 2)
        return x * tl.where(x < 0.0, tail, 1.0 - tail)


@triton.jit
def gelu_tanh(x):
    """The approximation of gelu by tanh, of x in fp32."""
    # (1 + tanh(z)) / 2 is sigmoid(2 z).
    return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))


@triton.jit
def softplus(x):
    """log(1 + exp(x)), exact where 1 + exp(x) is rounded; x in fp32."""
    e = tl.exp(tl.minimum(x, 20.0))
    wide = 1.0 + e
    log = tl.where(wide == 1.0, e, tl.log(wide) * tl.div_rn(e, tl.maximum(wide - 1.0, 1e-30)))
    return tl.where(x > 20.0, x, log)


@triton.jit(do_not_specialize=["rows"])
def _gated(
    gate,
    up,
    out,
    rows,
    sizes,
    WIDTH: constexpr,
    BLOCK: constexpr,
    ROWS: constexpr,
    ACTIVATION: constexpr,
    PDL: constexpr,
):
    row, column, inside = row_tile(rows, WIDTH, tl.program_id(1) * BLOCK, ROWS, BLOCK)
    DTYPE: constexpr = gate.ptr.dtype.element_ty
    begin(PDL)
    gate = load_rows(gate, row, column, sizes, inside)
    up = load_rows(up, row, column, sizes, inside)
    if ACTIVATION == "silu":
        activated = silu(gate, DTYPE)
    elif ACTIVATION == "none":
        activated = gelu(gate, DTYPE)
    else:
        activated = gelu_tanh(gate)
    store_rows(out, row, column, sizes, activated.to(DTYPE).to(tl.float32) * up, inside)


def unlike_gate(gate: Tensor, up: Tensor) -> Refusal | None:
    """Refuse an up whose dtype or shape differs from that of the gate."""
    return unlike(FLOATS, gate=gate, up=up) or unlike_shapes(gate, up=up)


def refuse_gated_activation(
    platform: Platform, gate: Tensor, up: Tensor, approximate: str = "none"
) -> Refusal | None:
    return (
        unfit(platform, gate=gate, up=up)
        or unlike_gate(gate, up)
        or unknown(("none", "tanh"), approximate=approximate)
    )


def gated_tile(rows: int, columns: int, device: torch.device) -> dict[str, int]:
    """The launch arguments for a gate: as many more rows as these are narrower than a block."""
    tile = GATED.choose(device, rows)
    block = min(tile["BLOCK"], triton.next_power_of_2(columns))
    return {**tile, "BLOCK": block, "ROWS": tile["ROWS"] * tile["BLOCK"] // block}


def _launch(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    out, columns = torch.empty_like(gate), gate.shape[-1]
    if rows := num_rows(out):
        tile = gated_tile(rows, columns, gate.device)
        _gated[(triton.cdiv(rows, tile["ROWS"]), triton.cdiv(columns, tile["BLOCK"]))](
            *map(rows_of, (gate, up, out)),
            rows,
            inner_sizes(gate),
            WIDTH=columns,
            ACTIVATION=activation,
            **tile,
            **overlap(gate.device),
        )
    return out


@ops.silu_and_mul.kernel("triton", refuses=refuse_gated_activation, tuned_for=GATED.archs)
def silu_and_mul(gate: Tensor, up: Tensor) -> Tensor:
    return _launch(gate, up, "silu")


@ops.gelu_and_mul.kernel("triton", refuses=refuse_gated_activation, tuned_for=GATED.archs)
def gelu_and_mul(gate: Tensor, up: Tensor, approximate: str) -> Tensor:
    return _launch(gate, up, approximate)
