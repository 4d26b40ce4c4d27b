"""Writes to the cache of keys and values, with what is fused in front of them."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from atomc.ops.norm import RMS_NORM_STYLES
from atomc.ops.rope import ROPE_STYLES
from kernel_cases.draw import E4M3, E4M3FNUZ, Cases, Draw, Make, cache_scales, slots_of
from kernel_cases.rope import qk_weights, rotary


def written(
    draw: Draw,
    positions: list[range],
    heads: int = 2,
    width: int = 64,
    skip: tuple[int, ...] = (),
    cache: torch.dtype | None = None,
) -> dict[str, Any]:
    """New tokens at these positions of as many sequences; rows `skip` are written nowhere."""
    k_cache, v_cache, blocks = draw.caches([p.stop for p in positions], heads, width, cache)
    slots = [
        slot
        for own, p in zip(blocks, positions, strict=True)
        for slot in slots_of(own, p, k_cache.shape[1])
    ]
    slots = [-1 if t in skip else slot for t, slot in enumerate(slots)]
    k, v = draw.normal(len(slots), heads, width), draw.normal(len(slots), heads, width)
    return {"k": k, "v": v, "k_cache": k_cache, "v_cache": v_cache, "slots": draw.ints(slots)}


def dense(draw: Draw, batch: int, positions: range, width: int = 64, v_width: int = 64) -> Any:
    """New tokens [batch, T, 2, width] at the same positions of all sequences of caches [batch, 2,
    16, width], transposed: a block is a sequence, and its heads follow each other.
    """
    shapes = {"k": width, "v": v_width}
    caches = {
        f"{name}_cache": draw.normal(batch, 2, 16, columns).transpose(1, 2)
        for name, columns in shapes.items()
    }
    rows = {
        name: draw.normal(batch, len(positions), 2, columns) for name, columns in shapes.items()
    }
    return rows | caches | {"slots": draw.ints(list(positions))}


def narrow_values(draw: Draw) -> tuple[Tensor, Tensor]:
    """Values and a cache of them for seven tokens of two heads, 32 wide."""
    return draw.normal(7, 2, 32), draw.caches([16], 2, 32)[1]


KV_WRITE: Cases = {
    "one token": lambda draw: written(draw, [range(5, 6)]),
    "a token each": lambda draw: written(draw, [range(4, 5), range(31, 32), range(16, 17)]),
    "over block borders": lambda draw: written(draw, [range(9, 42), range(0, 17)]),
    "some nowhere": lambda draw: written(draw, [range(9, 42), range(0, 3)], skip=(0, 7, 35)),
    "all nowhere": lambda draw: written(draw, [range(0, 3)], skip=(0, 1, 2)),
    "no tokens": lambda draw: written(draw, [range(3, 3)]),
    "many tokens": lambda draw: written(draw, [range(0, 2100)]),
    "values narrower than keys": lambda draw: (
        written(draw, [range(9, 16)])
        | dict(zip(("v", "v_cache"), narrow_values(draw), strict=True))
    ),
    "one head, narrow": lambda draw: written(draw, [range(0, 33)], heads=1, width=8),
    "odd width": lambda draw: written(draw, [range(15, 18)], heads=4, width=80),
    "packed": lambda draw: (
        written(draw, [range(9, 16)])
        | dict(zip(("k", "v"), draw.heads(7, 8, 2, 2, width=64)[1:], strict=True))
    ),
    "batch": lambda draw: (
        written(draw, [range(9, 16), range(0, 7)])
        | {"k": draw.normal(2, 7, 2, 64), "v": draw.normal(2, 7, 2, 64)}
    ),
    "dense": lambda draw: dense(draw, 1, range(9, 10)),
    "dense, several tokens": lambda draw: dense(draw, 1, range(3, 10)),
    "dense, batch": lambda draw: dense(draw, 3, range(15, 16)),
    "dense, batch, several tokens": lambda draw: dense(draw, 3, range(3, 10), v_width=32),
    "shared offsets, some nowhere": lambda draw: (
        {name: x.contiguous() for name, x in dense(draw, 3, range(3, 6)).items()}
        | {"slots": draw.ints([5, -1, 0])}
    ),
    "fp8": lambda draw: written(draw, [range(9, 42), range(0, 3)], skip=(0, 7), cache=E4M3),
    "fp8 with scales": lambda draw: (
        written(draw, [range(9, 42), range(0, 3)], skip=(2,), cache=E4M3) | cache_scales(draw)
    ),
    "wider than the cache": lambda draw: (
        written(draw, [range(9, 16)]) | {"k": draw.normal(7, 2, 64, dtype=torch.float32)}
    ),
}


def rope_written(
    draw: Draw,
    tokens: int = 7,
    heads: tuple[int, int] = (8, 2),
    width: int = 64,
    skip: tuple[int, ...] = (),
    packed: bool = False,
    rope_style: str = "neox",
    cache: torch.dtype | None = None,
    **table: Any,
) -> dict[str, Any]:
    arguments = written(draw, [range(12, 12 + tokens)], heads[1], width, skip, cache)
    arguments["q"] = draw.normal(tokens, heads[0], width)
    if packed:
        arguments |= zip(
            ("q", "k", "v"), draw.heads(tokens, *heads, heads[1], width=width), strict=True
        )
    cos, sin = rotary(draw, tokens, width, style=rope_style, **table)
    return arguments | {"cos": cos, "sin": sin, "rope_style": rope_style}


def dense_rope_written(draw: Draw, batch: int, table_batch: int) -> dict[str, Any]:
    """A token of each sequence, with tables of their own or for all."""
    arguments = dense(draw, batch, range(9, 10)) | {"rope_style": "neox"}
    tables = {name: draw.normal(table_batch, 1, 1, 64) for name in ("cos", "sin")}
    return arguments | tables | {"q": draw.normal(batch, 1, 8, 64)}


ROPE_KV_WRITE: Cases = {
    **{style: partial(rope_written, rope_style=style) for style in ROPE_STYLES},
    "dense": partial(dense_rope_written, batch=1, table_batch=1),
    "dense, batch": partial(dense_rope_written, batch=3, table_batch=3),
    "dense, batch, one position": partial(dense_rope_written, batch=3, table_batch=1),
    **{
        f"{style}, packed, partial": partial(
            rope_written, packed=True, width=80, rotated=32, rope_style=style
        )
        for style in ROPE_STYLES
    },
    "one token": partial(rope_written, tokens=1),
    "no tokens": partial(rope_written, tokens=0),
    "many tokens": partial(rope_written, tokens=450),
    "some nowhere": partial(rope_written, tokens=33, skip=(0, 4, 32)),
    "as many keys as queries": partial(rope_written, heads=(4, 4), width=128),
    "one key head, narrow": partial(rope_written, heads=(6, 1), width=8),
    "fp32 tables": partial(rope_written, table=torch.float32),
    "fp32 tables, in fp32": lambda draw: (
        rope_written(draw, table=torch.float32) | {"in_fp32": True}
    ),
    "fp8, in fp32": lambda draw: (
        rope_written(draw, table=torch.float32, cache=E4M3) | cache_scales(draw) | {"in_fp32": True}
    ),
    "heads before tokens": lambda draw: (
        rope_written(draw) | {"q": draw.normal(8, 7, 64).transpose(0, 1)}
    ),
    "heads before tokens, partial": lambda draw: (
        rope_written(draw, rotated=32) | {"q": draw.normal(8, 7, 64).transpose(0, 1)}
    ),
}


def norm_rope_written(
    draw: Draw, norm_style: str = "after", weight: torch.dtype | None = None, **rest: Any
) -> dict[str, Any]:
    arguments = rope_written(draw, **rest)
    return (
        arguments | qk_weights(draw, arguments["q"].shape[-1], weight) | {"norm_style": norm_style}
    )


QK_NORM_ROPE_KV_WRITE: Cases = {
    **{
        f"{norm}, {rope}": partial(norm_rope_written, norm_style=norm, rope_style=rope)
        for norm in RMS_NORM_STYLES
        for rope in ROPE_STYLES
    },
    "packed": partial(norm_rope_written, packed=True),
    "packed, partial": partial(
        norm_rope_written, packed=True, width=80, rotated=32, rope_style="half"
    ),
    "one token": partial(norm_rope_written, tokens=1),
    "no tokens": partial(norm_rope_written, tokens=0),
    "some nowhere": partial(norm_rope_written, tokens=33, skip=(0, 4, 32)),
    "as many keys as queries": partial(norm_rope_written, heads=(4, 4), width=128),
    "one key head, narrow": partial(norm_rope_written, heads=(6, 1), width=8),
    "fp32 weight": partial(norm_rope_written, weight=torch.float32),
    "fp32 tables": partial(norm_rope_written, table=torch.float32),
    "dense, batch": lambda draw: (
        dense_rope_written(draw, 3, 3) | qk_weights(draw, 64, None) | {"norm_style": "after"}
    ),
}

FP8_WRITES: dict[str, Any] = {
    "fp8": dict(cache=E4M3),
    "fp8, packed, partial": dict(cache=E4M3, packed=True, width=80, rotated=32, rope_style="half"),
    "e4m3fnuz, some nowhere": dict(cache=E4M3FNUZ, tokens=33, skip=(0, 4, 32)),
}


def with_cache_scales(make: Make) -> Make:
    return lambda draw: make(draw) | cache_scales(draw)


for name, how in FP8_WRITES.items():
    ROPE_KV_WRITE |= {
        name: partial(rope_written, **how),
        f"{name}, scales": with_cache_scales(partial(rope_written, **how)),
    }
    QK_NORM_ROPE_KV_WRITE |= {
        name: partial(norm_rope_written, **how),
        f"{name}, scales": with_cache_scales(partial(norm_rope_written, **how)),
    }
