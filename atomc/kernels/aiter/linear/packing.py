"""How AITER wants weights and scales to lie, and the dtypes that it calls their bits."""

import torch
from torch import Tensor

from atomc.ops.op import Prepared


def e2m1_view(packed: Tensor) -> Tensor:
    """uint8 of two codes each, under torch's name for that."""
    return packed.view(torch.float4_e2m1fn_x2)


def e8m0_view(scale: Tensor) -> Tensor:
    """uint8 exponents under torch's name for them."""
    return scale.view(torch.float8_e8m0fnu)


def shuffled_weight(weight: Tensor) -> Tensor:
    """[..., N, K] in tiles of 16 rows and 32 columns, each in pieces of 16 bytes that a wave reads
    as they lie; the same shape.

    Raises ValueError if N is no multiple of 16 or K none of 32.
    """
    n, k = weight.shape[-2:]
    if n % 16 or k % 32:
        raise ValueError(f"a weight of {n} x {k} does not fill tiles of 16 x 32")
    numbers = weight.detach()
    if numbers.element_size() == 1:
        numbers = numbers.view(torch.uint8)
    piece = 16 // numbers.element_size()
    tiles = numbers.reshape(-1, n // 16, 16, k // 32, 32 // piece, piece)
    relaid = tiles.permute(0, 1, 3, 4, 2, 5).contiguous()
    return relaid.view(weight.shape).view(weight.dtype)


def plain_weight(shuffled: Tensor) -> Tensor:
    """The weight [N, K] of which shuffled_weight made this: a copy."""
    n, k = shuffled.shape
    piece = 16 // shuffled.element_size()
    tiles = shuffled.view(n // 16, k // 32, 32 // piece, 16, piece)
    return tiles.permute(0, 3, 1, 2, 4).reshape(n, k)


def shuffled_scale(scale: Tensor) -> Tensor:
    """e8m0 [M, K/32], a multiple of 8 columns, in tiles of 32 rows and 8 columns: [M up to whole
    256 rows, K/32]. The rows behind M are not written.

    One copy for up to 16 rows and for multiples of 32, otherwise up to three.
    """
    m, k = scale.shape
    return _tiled(scale, scale.new_empty((m + -m % 256, k)))


def _tiled(scale: Tensor, out: Tensor) -> Tensor:
    # Tile, half of its rows, row; tile of columns, half of its columns, column.
    tiles = out.view(-1, out.shape[1] // 8, 4, 16, 2, 2).permute(0, 5, 3, 1, 4, 2)
    m, k = scale.shape
    columns, whole = scale.view(m, k // 8, 2, 4), m // 32
    if whole:
        tiles[:whole].copy_(columns[: 32 * whole].view(whole, 2, 16, k // 8, 2, 4))
    for half, start in enumerate(range(32 * whole, m, 16)):
        rows = columns[start : start + 16]
        tiles[whole, half, : rows.shape[0]].copy_(rows)
    return out


def relaid_weight(weight: Tensor) -> Prepared:
    return Prepared((shuffled_weight(weight),))


def relaid_scale(scale: Tensor) -> Prepared:
    n, k = scale.shape
    ones = scale.new_full((n + -n % 256, k), 127)
    return Prepared((_tiled(scale.detach(), ones),))
