"""Rotary positions. T tokens, N query heads, K key heads, D head width, R rotated width."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from atomc.ops.norm import RMS_NORM_STYLES
from atomc.ops.rope import ROPE_STYLES, columns_per_angle
from atomc.ops.rotary_tables import TABLE_STYLES
from kernel_cases.draw import EPS, Cases, Draw


def rotary(
    draw: Draw,
    tokens: int = 7,
    width: int = 64,
    rotated: int | None = None,
    style: str = "neox",
    table: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    columns = (rotated or width) // columns_per_angle(style)
    return draw.tables(tokens, 1, columns, dtype=table)


def roped(
    draw: Draw, heads: int = 6, tokens: int = 7, width: int = 64, style: str = "neox", **table: Any
) -> dict[str, Any]:
    cos, sin = rotary(draw, tokens, width, style=style, **table)
    return {"x": draw.normal(tokens, heads, width), "cos": cos, "sin": sin, "style": style}


def rope_cases() -> Cases:
    cases: Cases = {}
    for style in ROPE_STYLES:
        cases[style] = partial(roped, style=style)
        cases[f"{style}, partial"] = partial(roped, width=80, rotated=32, style=style)
        cases[f"{style}, fp32 tables"] = partial(roped, style=style, table=torch.float32)
        cases[f"{style}, packed"] = lambda draw, style=style: (
            roped(draw, style=style) | {"x": draw.heads(7, 8, 6, width=64)[1]}
        )
        cases[f"{style}, heads before tokens"] = lambda draw, style=style: (
            roped(draw, style=style) | {"x": draw.normal(6, 7, 64).transpose(0, 1)}
        )
        cases[f"{style}, in fp32"] = lambda draw, style=style: (
            roped(draw, width=80, rotated=32, style=style) | {"in_fp32": True}
        )
    cases["fp32 tables, in fp32"] = lambda draw: (
        roped(draw, table=torch.float32) | {"x": draw.heads(7, 8, 6, width=64)[1], "in_fp32": True}
    )
    cases["one token"] = partial(roped, tokens=1)
    cases["narrow"] = partial(roped, tokens=33, width=8, heads=1)
    cases["no tokens"] = partial(roped, tokens=0)
    cases["batch"] = lambda draw: roped(draw) | {"x": draw.normal(2, 7, 4, 64)}
    cases["batch of heads"] = lambda draw: (
        dict(zip(("cos", "sin"), draw.tables(2, 1, 7, 64), strict=True))
        | {"x": draw.normal(2, 4, 7, 64)}
    )
    return cases


def positioned(
    draw: Draw, shape: tuple[int, ...] = (7, 1), frequencies: int = 24, **rest: Any
) -> dict[str, Any]:
    """Positions of this shape, of contexts of up to a million tokens."""
    inv_freq = 10000.0 ** (-torch.arange(frequencies) / frequencies)
    positions = draw.below(2**20, *shape)
    return {"positions": positions, "inv_freq": inv_freq.to(draw.device)} | rest


ROTARY_TABLES: Cases = {
    **{
        f"{style}, {name}": partial(positioned, shape=shape, style=style)
        for style in TABLE_STYLES
        for name, shape in {"rows": (13, 1), "batch": (2, 7, 1), "image": (2, 7, 24)}.items()
    },
    "in the dtype of the model": lambda draw: positioned(draw, scaling=1.3, dtype=draw.dtype),
    "one token": partial(positioned, shape=(1, 1, 1), frequencies=64),
    "no tokens": partial(positioned, shape=(0, 1)),
    "several programs": partial(positioned, shape=(2, 300, 1), frequencies=3, style="pairs"),
    "transposed": lambda draw: (
        positioned(draw) | {"positions": draw.below(2**20, 24, 3, 2).transpose(0, 2)}
    ),
    "tokens in the last dimension": lambda draw: (
        positioned(draw) | {"positions": draw.below(2**20, 2, 1, 7).mT}
    ),
    "one row for the batch": lambda draw: (
        positioned(draw) | {"positions": draw.below(2**20, 1, 7, 1).expand(3, -1, -1)}
    ),
    "fp32 positions": lambda draw: (
        positioned(draw) | {"positions": draw.normal(7, 1, dtype=torch.float32)}
    ),
    "int32 positions, 16-bit frequencies": lambda draw: {
        "positions": draw.below(2**20, 7, 1, dtype=torch.int32),
        "inv_freq": draw.normal(5),
    },
}


def qk(
    draw: Draw, heads: tuple[int, int] = (8, 2), tokens: int = 7, width: int = 64
) -> dict[str, Any]:
    return {"q": draw.normal(tokens, heads[0], width), "k": draw.normal(tokens, heads[1], width)}


def qk_weights(draw: Draw, width: int = 64, dtype: torch.dtype | None = None) -> dict[str, Any]:
    return {
        "q_weight": draw.normal(width, dtype=dtype),
        "k_weight": draw.normal(width, dtype=dtype),
        "eps": EPS,
    }


def qk_normed(
    draw: Draw,
    heads: tuple[int, int] = (8, 2),
    tokens: int = 7,
    width: int = 64,
    packed: bool = False,
    norm_style: str = "after",
    rope_style: str = "neox",
    weight: torch.dtype | None = None,
    **table: Any,
) -> dict[str, Any]:
    cos, sin = rotary(draw, tokens, width, style=rope_style, **table)
    arguments = qk(draw, heads, tokens, width) | qk_weights(draw, width, weight)
    if packed:
        arguments["q"], arguments["k"], _ = draw.heads(tokens, *heads, heads[1], width=width)
    return arguments | {"cos": cos, "sin": sin, "norm_style": norm_style, "rope_style": rope_style}


QK_NORM_ROPE: Cases = {
    **{
        f"{norm}, {rope}": partial(qk_normed, norm_style=norm, rope_style=rope)
        for norm in RMS_NORM_STYLES
        for rope in ROPE_STYLES
    },
    "packed": partial(qk_normed, packed=True),
    "packed, partial": partial(qk_normed, packed=True, width=80, rotated=32, rope_style="half"),
    "as many keys as queries": partial(qk_normed, heads=(4, 4), width=128),
    "one key head, narrow": partial(qk_normed, heads=(6, 1), width=8, tokens=33),
    "one token": partial(qk_normed, tokens=1),
    "no tokens": partial(qk_normed, tokens=0),
    "fp32 weight": partial(qk_normed, weight=torch.float32),
    "fp32 weight, before": partial(qk_normed, weight=torch.float32, norm_style="before"),
    "fp32 tables": partial(qk_normed, table=torch.float32),
    "heads before tokens": lambda draw: (
        qk_normed(draw)
        | {"q": draw.normal(8, 7, 64).transpose(0, 1), "k": draw.normal(2, 7, 64).transpose(0, 1)}
    ),
}
