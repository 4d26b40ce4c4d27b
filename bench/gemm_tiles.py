"""The kernels of linear layers for few rows, under every tile worth a try."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from atomc.kernels.triton.launch.tile_table import StripTile, Tile
from atomc.kernels.triton.linear import linear, scaled_linear
from atomc.kernels.triton.w4a16 import unpacking, w4a16, w4a16_mma_rows

Tiles = Iterator[tuple[str, Callable[..., Any]]]


def tiles(op: str, rows: int, k: int, prepared: bool) -> Tiles:
    """(the numbers of a tile, the kernel of this op with it), for so many rows and inputs. prepared:
    the kernel gets weights in strips.
    """
    if op == "linear":
        return _sixteen_bits(rows, k)
    if prepared:
        return _in_strips(rows, op == "linear_w4a16")
    return _eight_bits(op, rows, k) if op.startswith("scaled") else _four_bits(rows)


def _height(rows: int) -> int:
    """The rows of x in a tile of the tensor cores."""
    return 8 if rows <= 8 else 16


def _sixteen_bits(rows: int, k: int) -> Tiles:
    if rows == 1:
        cut = [
            Tile(1, n, columns, 0, warps)
            for n, columns, warps in product((1, 2, 4, 8), (128, 256, 512, 1024, 2048), (2, 4, 8))
            if columns <= k and 512 <= n * columns <= 8192
        ]
    else:
        cut = [
            Tile(_height(rows), n, columns, parts, warps, stages)
            for n, columns, (parts, warps), stages in product(
                (16, 32), (64, 128, 256), ((2, 2), (4, 4), (8, 8)), (2, 3, 4, 6)
            )
            if n * columns * parts * stages <= 65536
        ]
    for tile in cut:
        yield str(tuple(tile)), partial(linear.multiply, bias=None, tile=tile)


def _eight_bits(op: str, rows: int, k: int) -> Tiles:
    blocks = op.endswith("block")

    def multiply(tile: Tile, **named: Any) -> Tensor:
        return scaled_linear.multiply(**{"bias": None} | named, tile=tile, blocks=blocks)

    if rows == 1:
        cut = [
            Tile(1, n, columns, 0, warps)
            for n, columns, warps in product((2, 4, 8), (1024, 2048, 4096), (4, 8))
            if columns <= k and n * columns <= 16384
        ]
    else:
        widths = (128,) if blocks else (128, 256)
        cut = [
            Tile(_height(rows), n, columns, parts, parts, stages)
            for n, columns, parts, stages in product((16, 32), widths, (2, 4, 8), (3, 5))
        ]
    for tile in cut:
        yield str(tuple(tile)), partial(multiply, tile)


def _in_strips(rows: int, int4: bool) -> Tiles:
    height = next(height for height in (8, 16, 32, 64, 128) if height >= min(rows, 128))
    for (n, warps), stages, (programs, columns) in product(
        ((32, 2), (64, 4), (128, 4), (128, 8)), (3, 4), ((264, 512), (396, 512), (396, 1024))
    ):
        tile = StripTile(height, n, warps, stages, programs, columns)
        yield str(tuple(tile)), partial(_multiply_in_strips, tile, int4)


def _multiply_in_strips(
    tile: StripTile,
    int4: bool,
    x: Tensor,
    weight: tuple[Tensor],
    weight_scale: tuple[Tensor],
    group: int = 32,
    x_scale: None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Of what w4a16_mma.py prepares, with the arguments of linear_w4a16 and linear_mxfp4."""
    return w4a16_mma_rows.multiply(x, *weight, *weight_scale, None, None, group, tile, int4=int4)


def _four_bits(rows: int) -> Tiles:
    if rows == 1:
        launches = [
            {"BLOCK_N": n, "BLOCK_W": size // 8, "num_warps": warps}
            for n, size, warps in product((2, 4, 8, 16), (2048, 4096), (4, 8))
        ]
    else:
        launches = [
            {
                "BLOCK_M": _height(rows),
                "BLOCK_N": n,
                "BLOCK_K": columns,
                "PARTS": parts,
                "num_warps": parts,
                "num_stages": stages,
            }
            for n, columns, parts, stages in product((16, 32), (128, 256), (2, 4, 8), (2, 4))
        ]
    for launch in launches:
        yield str(tuple(launch.values())), partial(_multiply_four_bits, launch)


def _multiply_four_bits(
    launch: dict[str, int],
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    group: int = 32,
    x_scale: Tensor | None = None,
    global_scale: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """The arguments of linear_w4a16, linear_mxfp4 and linear_nvfp4."""
    words = weight if weight.dtype == torch.int32 else unpacking.code_words(weight)
    if global_scale is not None:
        weight_scale, group = weight_scale.view(torch.int8), 16
    none = (None, x_scale, None)
    return w4a16.multiply(x, words, weight_scale, *none, group, out_dtype, launch, global_scale)
