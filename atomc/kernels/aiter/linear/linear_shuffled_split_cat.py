"""Keys and values of all heads from the latent by AITER's Triton kernels over a shuffled weight: a
product in fp8 by blocks, whose result is split and joined to the rotated keys.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from atomc import ops
from atomc.kernels.aiter.library import Function, foreign_operands, installed
from atomc.kernels.aiter.linear.packing import shuffled_weight
from atomc.kernels.checks import first_refusal, wrong_result
from atomc.kernels.row_views import as_rows
from atomc.ops.op import Prepared, Refusal

FUSED = "aiter.ops.triton.gemm.fused."
fused_gemm_a8w8_blockscale_preshuffle_split_cat = Function(
    "fused_gemm_a8w8_blockscale_preshuffle_split_cat",
    f"{FUSED}fused_gemm_a8w8_blockscale_split_cat",
    takes=["is_x_scale_transposed"],
)
# Outputs of the widest tile in AITER's tables: it reads whole tiles of a shuffled weight.
OUTPUTS = 256
BLOCK = 128


def partial_tiles(weight: Tensor, inputs: int) -> Refusal | None:
    """Unless the weight consists of whole tiles of so many bytes a row."""
    n, k = weight.shape
    if n % OUTPUTS or k % inputs:
        return Refusal(
            "shape",
            f"a weight of {n} x {k} bytes: AITER reads whole tiles of a shuffled one, of {OUTPUTS} "
            f"x {inputs}",
        )
    return None


def tile_rows(weight: Tensor) -> Prepared:
    """The shuffled weight [N, K bytes] as rows of tiles, [N/16, 16 K]."""
    return Prepared((shuffled_weight(weight).view(weight.shape[0] // 16, -1),))


def split_cat(
    function: Callable[..., tuple[Tensor, Tensor]],
    operands: tuple[Tensor, Tensor, Tensor, Tensor],
    k_pe: Tensor,
    nope: int,
    outputs: int,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """linear_split_cat by a function of AITER's, whose weight has so many outputs. operands: x, the
    weight, and the scales of both.
    """
    x, weight, x_scale, weight_scale = operands
    *lead, heads, rotated = k_pe.shape
    value = outputs // heads - nope
    shapes = (*lead, heads, nope + rotated), (*lead, heads, value)
    if not x.numel():
        return k_pe.new_empty(shapes[0]), k_pe.new_empty(shapes[1])
    k, v = function(
        as_rows(x),
        weight,
        k_pe.reshape(-1, heads, rotated),
        as_rows(x_scale),
        weight_scale,
        nope,
        value,
        dtype=out_dtype,
    )
    return k.view(shapes[0]), v.view(shapes[1])


def other_keys(k_pe: Tensor, out_dtype: torch.dtype) -> Refusal | None:
    """Unless the rotated keys have the dtype of the result."""
    return wrong_result((k_pe.dtype,), out_dtype)


refuse_tiles = first_refusal(
    installed(fused_gemm_a8w8_blockscale_preshuffle_split_cat),
    other_keys,
    foreign_operands,
    lambda weight: partial_tiles(weight, BLOCK),
)


@ops.linear_split_cat.kernel("aiter", refuses=refuse_tiles, prepare={"weight": tile_rows})
def linear_split_cat(
    x: Tensor,
    weight: tuple[Tensor],
    x_scale: Tensor,
    weight_scale: Tensor,
    k_pe: Tensor,
    nope: int,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    return split_tiles(x, weight[0], x_scale, weight_scale, k_pe, nope, out_dtype)


def split_tiles(
    x: Tensor,
    tiles: Tensor,
    x_scale: Tensor,
    weight_scale: Tensor,
    k_pe: Tensor,
    nope: int,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """linear_split_cat over the rows of tiles of a weight."""
    return split_cat(
        partial(fused_gemm_a8w8_blockscale_preshuffle_split_cat, is_x_scale_transposed=False),
        (x, tiles, x_scale, weight_scale),
        k_pe,
        nope,
        16 * tiles.shape[0],
        out_dtype,
    )
