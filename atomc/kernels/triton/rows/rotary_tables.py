"""The tables of rotary positions in Triton: a program takes a block of angles of all rows."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from atomc import ops
from atomc.graph.sizes import known_equal, spell_shape
from atomc.kernels.checks import unknown, wrong_rank, wrong_result
from atomc.kernels.triton.launch.launch import (
    MAX_DIMS,
    at,
    begin,
    inner_sizes,
    overlap,
    rows_of,
    unfit,
)
from atomc.ops.formats import FLOATS
from atomc.ops.op import Refusal
from atomc.ops.rotary_tables import TABLE_STYLES
from atomc.platform import Platform

BLOCK = 256


@triton.jit(do_not_specialize=["numel"])
def _rotary_tables(
    positions,
    inv_freq_ptr,
    cos_ptr,
    sin_ptr,
    numel,
    sizes,
    step,
    scaling,
    N: constexpr,
    STYLE: constexpr,
    BLOCK: constexpr,
    PDL: constexpr,
):
    begin(PDL)
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offset < numel
    row, column = offset // N, offset % N
    position = tl.load(at(positions, row, sizes) + column * step, inside, 0).to(tl.float32)
    angle = position * tl.load(inv_freq_ptr + column, inside, 0.0).to(tl.float32)
    # Both reduce large angles exactly, as PyTorch's do.
    cos = (tl.cos(angle) * scaling).to(cos_ptr.dtype.element_ty)
    sin = (tl.sin(angle) * scaling).to(sin_ptr.dtype.element_ty)
    offset = offset.to(tl.int64)
    first = offset if STYLE == "half" else 2 * offset if STYLE == "pairs" else 2 * offset - column
    tl.store(cos_ptr + first, cos, inside)
    tl.store(sin_ptr + first, sin, inside)
    if STYLE != "half":
        second = first + (1 if STYLE == "pairs" else N)
        tl.store(cos_ptr + second, cos, inside)
        tl.store(sin_ptr + second, sin, inside)


def refuse_rotary_tables(
    platform: Platform, positions: Tensor, inv_freq: Tensor, style: str, dtype: torch.dtype
) -> Refusal | None:
    if not any(known_equal(positions.shape[-1], n) for n in (1, *inv_freq.shape)):
        return Refusal(
            "shape",
            f"positions {spell_shape(positions.shape)} for {spell_shape(inv_freq.shape)} "
            "frequencies",
        )
    return (
        unfit(platform, inv_freq=inv_freq)
        or wrong_rank((1,), inv_freq=inv_freq)
        or wrong_rank(range(1, MAX_DIMS + 1), positions=positions)
        or unknown(TABLE_STYLES, style=style)
        or wrong_result(FLOATS, dtype)
    )


@ops.rotary_tables.kernel("triton", refuses=refuse_rotary_tables)
def rotary_tables(
    positions: Tensor, inv_freq: Tensor, style: str, scaling: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    n = inv_freq.shape[0]
    positions = positions.expand(*positions.shape[:-1], n)
    width = n if style == "half" else 2 * n
    cos, sin = (inv_freq.new_empty((*positions.shape[:-1], width), dtype=dtype) for _ in range(2))
    if numel := positions.numel():
        _rotary_tables[(triton.cdiv(numel, BLOCK),)](
            rows_of(positions),
            inv_freq,
            cos,
            sin,
            numel,
            inner_sizes(positions),
            positions.stride(-1),
            scaling,
            N=n,
            STYLE=style,
            BLOCK=BLOCK,
            **overlap(positions.device),
        )
    return cos, sin
