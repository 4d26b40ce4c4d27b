"""Keys and values of all heads from the latent by AITER's Triton kernels over a shuffled weight and
its shuffled scales: a product in MXFP4, whose result is split and joined to the rotated keys.
"""

import torch
from torch import Tensor

from atomc import ops
from atomc.kernels.aiter.library import Function, installed, no_mxfp4
from atomc.kernels.aiter.linear.linear_shuffled_split_cat import (
    FUSED,
    other_keys,
    partial_tiles,
    split_cat,
    tile_rows,
)
from atomc.kernels.aiter.linear.packing import relaid_scale, shuffled_scale
from atomc.kernels.checks import first_refusal
from atomc.kernels.row_views import as_rows
from atomc.ops.op import Prepared, Refusal

fused_gemm_afp4wfp4_preshuffle_split_cat = Function(
    "fused_gemm_afp4wfp4_preshuffle_split_cat", f"{FUSED}fused_gemm_afp4wfp4_split_cat"
)
# Scales of so many inputs at a time AITER reads in MXFP4, or of a smaller power of two; behind the
# last row may be a NaN.
AT_ONCE = 1024
# From so many rows on it reads shuffled scales of x.
SHUFFLED = 32
# A tile of scales has so many columns, those of this number of bytes of codes.
TILE_BYTES = 128


def scale_rows(weight_scale: Tensor) -> Prepared:
    """The shuffled scales [N, K/32] as rows of tiles, [N/32, K]."""
    [tiles] = relaid_scale(weight_scale).tensors
    return Prepared((_tile_rows(tiles),))


def _tile_rows(scales: Tensor) -> Tensor:
    return scales.view(scales.shape[0] // 32, -1)


def _other_scheme(scheme: str) -> Refusal | None:
    if scheme != "mxfp4":
        return Refusal("argument", f"AITER's kernel multiplies in MXFP4, not in {scheme}")
    return None


def _odd_scales(weight: Tensor) -> Refusal | None:
    width = 2 * weight.shape[1]
    if width % AT_ONCE and width & (width - 1):
        return Refusal(
            "shape", f"rows of {width}: AITER takes a power of two, or a multiple of {AT_ONCE}"
        )
    return None


refuse_tiles = first_refusal(
    _other_scheme,
    installed(fused_gemm_afp4wfp4_preshuffle_split_cat),
    no_mxfp4,
    other_keys,
    lambda weight: partial_tiles(weight, TILE_BYTES),
    _odd_scales,
)


@ops.linear_split_cat.kernel(
    "aiter", refuses=refuse_tiles, prepare={"weight": tile_rows, "weight_scale": scale_rows}
)
def linear_split_cat(
    x: Tensor,
    weight: tuple[Tensor],
    x_scale: Tensor,
    weight_scale: tuple[Tensor],
    k_pe: Tensor,
    nope: int,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    return split_tiles(x, weight[0], x_scale, weight_scale[0], k_pe, nope, out_dtype)


def split_tiles(
    x: Tensor,
    tiles: Tensor,
    x_scale: Tensor,
    scale_tiles: Tensor,
    k_pe: Tensor,
    nope: int,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """linear_split_cat over the rows of tiles of a weight and its scales."""
    scales = as_rows(x_scale)
    if scales.shape[0] >= SHUFFLED:
        scales = _tile_rows(shuffled_scale(scales.contiguous()))
    operands = x, tiles, scales, scale_tiles
    outputs = 16 * tiles.shape[0]
    return split_cat(
        fused_gemm_afp4wfp4_preshuffle_split_cat, operands, k_pe, nope, outputs, out_dtype
    )
