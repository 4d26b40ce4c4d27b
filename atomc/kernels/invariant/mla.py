"""Latent attention over a paged cache without splits, with one tile for all steps, and the products
per head around it.
"""

from typing import Unpack

import triton
from torch import Tensor

from atomc import ops
from atomc.kernels.checks import first_refusal, named, unlike
from atomc.kernels.invariant.linear import multiply
from atomc.kernels.row_views import as_heads, with_lead
from atomc.kernels.triton.attention.attention_tiles import has_room
from atomc.kernels.triton.latent import mla_attention as varying
from atomc.kernels.triton.launch.launch import unfit
from atomc.kernels.triton.launch.tiles import LATENT_ATTENTION
from atomc.ops.formats import FLOATS
from atomc.ops.mla_attention import LatentOperands

ROWS = 32  # of a tile: so many heads, for one or more tokens


@ops.mla_absorbed_attention.kernel(
    "invariant", layout="paged", refuses=varying.refuse_mla_absorbed_attention
)
def mla_absorbed_attention(q: Tensor, **operands: Unpack[LatentOperands]) -> Tensor:
    rows = as_heads(q)
    if rows.shape[0] == 0:
        return q.new_empty((*q.shape[:-1], operands["latent"]))
    return with_lead(varying.attend(rows, _tiling(q), **operands), q)


def _tiling(q: Tensor) -> varying.LatentTiling:
    """By the heads, the dtype and the device, not by the tokens."""
    tile, heads = LATENT_ATTENTION.choose(q.device, ROWS), q.shape[-2]
    rows, keys, stages = tile.rows, tile.keys, tile.stages
    if q.element_size() == 4 or not has_room(q.device):
        rows, keys, stages = 16, 16, 1
    of_tile = triton.cdiv(heads, triton.cdiv(heads, rows))
    return varying.LatentTiling(rows, keys, of_tile, 1, tile.warps, stages, False)


@ops.linear_by_head.kernel(
    "invariant",
    refuses=first_refusal(named("platform x", unfit), named("x weight", unlike, FLOATS)),
)
def linear_by_head(x: Tensor, weight: Tensor) -> Tensor:
    rows, (heads, n, _) = as_heads(x), weight.shape
    out = x.new_empty((rows.shape[0], heads, n))
    if rows.shape[0]:
        multiply(rows, weight, out)
    return with_lead(out, x)
