"""Unpacks 4-bit weights in the order of fragments.py; their values are rounded to 16 bits."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from atomc.kernels.triton.w4a16.fragment_products import fragment_weight, number_types, part_values
from atomc.kernels.triton.w4a16.fragments import E2M1_UNIT, STRIP, fragment_row, strip_offset


@triton.jit
def _unpack(
    weight,
    out_ptr,
    N,
    K: constexpr,
    GROUP: constexpr,
    INT4: constexpr,
    SIXTEEN: constexpr,
    NUMBER: constexpr,
    BLOCK_N: constexpr,
    num_warps: constexpr,
):
    PARTS: constexpr = (K + 127) // 128
    part = tl.program_id(1)
    place = tl.arange(0, BLOCK_N)[:, None]
    read = tl.program_id(0) * BLOCK_N + fragment_row(place, num_warps)
    inside = read < N
    at = strip_offset(read, part, PARTS).to(tl.int64)
    words = tl.load(weight.words + at * 16 + tl.arange(0, 16)[None, :], inside, 0)
    of_row = at + tl.zeros((1, 4), tl.int32)
    words = tl.reshape(words, (BLOCK_N, 4, 4))
    values = part_values(
        words, weight, of_row, inside, GROUP, INT4, SIXTEEN, num_warps, NUMBER, True
    )
    if not INT4:
        values *= E2M1_UNIT
    row = tl.program_id(0) * BLOCK_N + place
    column = part * 128 + tl.arange(0, 128)[None, :]
    to = out_ptr + row.to(tl.int64) * K + column
    tl.store(to, values.to(out_ptr.dtype.element_ty), (row < N) & (column < K))


def unpacked(
    words: Tensor,
    scale: Tensor,
    zeros: Tensor | None,
    group: int,
    columns: int,
    dtype: torch.dtype,
    *,
    int4: bool = True,
) -> Tensor:
    """The values [N, columns] of the weight, scales and zeros that w4a16_mma.py prepares, rounded
    to dtype: that of the scales of int4, bf16 of MXFP4.
    """
    n = len(words) * STRIP.value
    out = words.new_empty((n, columns), dtype=dtype)
    _unpack[(triton.cdiv(n, 64), triton.cdiv(columns, 128))](
        fragment_weight(words, scale, zeros),
        out,
        n,
        K=columns,
        GROUP=group,
        INT4=int4,
        **number_types(dtype),
        BLOCK_N=64,
        num_warps=4,
    )
    return out
