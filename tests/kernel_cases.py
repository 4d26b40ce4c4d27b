"""Arguments to try each op with: one table for the meanings and for every kernel.

A case is a function from `Draw` to the op's arguments; it makes the same numbers each time it is called.
T tokens, N query heads, K key/value heads, D head width, R rotated width.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed

from atomc import ops
from atomc.ops.formats import MX_ROUNDINGS, pack_int4
from atomc.ops.norm import RMS_NORM_STYLES
from atomc.ops.rope import ROPE_STYLES
from atomc.ops.schemes import SCHEMES

EPS = 1e-5
# What lies in a cache where no key was written: large, so that reading it shows, and finite, so that masking it works.
GARBAGE = 1e4


@dataclass
class Draw:
    """Random inputs of one dtype on one device, and caches of one layout."""

    dtype: torch.dtype
    device: str = "cpu"
    layout: str = "paged"
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0))

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(dtype or self.dtype).to(self.device)

    def below(self, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.randint(high, shape, generator=self.generator).to(dtype).to(self.device)

    def packed(self, *shape: int) -> tuple[Tensor, Tensor]:
        """Two tensors of this shape, neighbours in the last dimension of one storage."""
        first, second = self.normal(*shape[:-1], 2 * shape[-1]).chunk(2, -1)
        return first, second

    def heads(self, tokens: int, *counts: int, width: int) -> tuple[Tensor, ...]:
        """[T, count, D] each, cut from one projection's output, as merged q, k and v are."""
        rows = self.normal(tokens, sum(counts) * width)
        return tuple(part.unflatten(-1, (-1, width)) for part in rows.split([n * width for n in counts], -1))

    def tables(self, *shape: int, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
        angle = 10 * torch.randn(shape, generator=self.generator)
        return tuple(table.to(dtype or self.dtype).to(self.device) for table in (angle.cos(), angle.sin()))

    def ints(self, values: list[int], dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)

    def caches(
        self, lengths: list[int], heads: int, width: int, dtype: torch.dtype | None = None
    ) -> tuple[Tensor, Tensor, list[list[int]]]:
        """Caches of garbage that have room for sequences of these lengths, and the blocks of each, in no order."""
        longest = max(lengths, default=1)
        block_size = ops.LAYOUTS[self.layout].block_size or longest + 3
        per_sequence = -(-longest // block_size) or 1
        count = 2 + per_sequence * len(lengths)
        spec = ops.StateSpec("kv", "kv", (heads, width), dtype or self.dtype, layout=self.layout)
        k_cache, v_cache = spec.allocate(count, block_size, self.device)
        order = torch.randperm(count, generator=self.generator).tolist()
        blocks = [order[s * per_sequence : (s + 1) * per_sequence] for s in range(len(lengths))]
        garbage = min(GARBAGE, torch.finfo(spec.dtype).max)
        return k_cache.fill_(garbage), v_cache.fill_(garbage), blocks


Make = Callable[[Draw], dict[str, Any]]
Cases = dict[str, Make]


def slots_of(blocks: list[int], positions: range, block_size: int) -> list[int]:
    return [blocks[p // block_size] * block_size + p % block_size for p in positions]


E4M3 = torch.float8_e4m3fn


def cache_scales(draw: Draw) -> dict[str, Any]:
    return {name: (0.02 + draw.normal(1, dtype=torch.float32).abs() / 50) for name in ("k_scale", "v_scale")}


# Norms and activations


def row_inputs(draw: Draw, kind: str) -> tuple[Tensor, Tensor]:
    """Two tensors [..., D] that lie in memory as `kind` says."""
    match kind:
        case "one row":
            return draw.normal(1, 64), draw.normal(1, 64)
        case "odd sizes":
            return draw.normal(33, 80), draw.normal(33, 80)
        case "narrow batch":
            return draw.normal(2, 7, 8), draw.normal(2, 7, 8)
        case "no rows":
            return draw.normal(0, 64), draw.normal(0, 64)
        case "one vector":
            return draw.normal(128), draw.normal(128)
        case "packed":
            return draw.packed(7, 128)
        case "heads of a packed projection":
            return draw.heads(7, 4, 4, width=64)
        case "transposed":
            return draw.normal(5, 7, 64).transpose(0, 1), draw.normal(5, 7, 64).transpose(0, 1)
        case "last dimension strided":
            return draw.normal(64, 7).t(), draw.normal(64, 7).t()
        case "wide":
            return draw.normal(3, 5000), draw.normal(3, 5000)
        case "many":
            return draw.normal(4100, 40), draw.normal(4100, 40)
    raise AssertionError(kind)


ROWS = ("one row", "odd sizes", "narrow batch", "no rows", "one vector", "packed", "heads of a packed projection",
        "transposed", "last dimension strided", "wide")  # fmt: skip


def gated(draw: Draw, kind: str, **attributes: Any) -> dict[str, Any]:
    gate, up = row_inputs(draw, kind)
    return {"gate": gate, "up": up, **attributes}


def normed(
    draw: Draw, kind: str, residual: bool, weight: torch.dtype | None = None, scale: float = 1.0, **attributes: Any
) -> dict[str, Any]:
    x, other = row_inputs(draw, kind)
    arguments = {"x": x * scale, "weight": draw.normal(x.shape[-1], dtype=weight), "eps": EPS, **attributes}
    return arguments | {"residual": other * scale} if residual else arguments


def rms_norm_cases(residual: bool) -> Cases:
    cases: Cases = {kind: partial(normed, kind=kind, residual=residual) for kind in (*ROWS, "many")}
    for style in RMS_NORM_STYLES:
        cases[style] = partial(normed, kind="odd sizes", residual=residual, style=style)
        cases[f"{style}, fp32 weight"] = partial(
            normed, kind="packed", residual=residual, style=style, weight=torch.float32
        )
    cases["large"] = partial(normed, kind="packed", residual=residual, scale=200.0)
    cases["eps matters"] = partial(normed, kind="packed", residual=residual, scale=0.01)
    return cases


def layer_normed(draw: Draw, kind: str, residual: bool, weight: bool = True, bias: bool = True) -> dict[str, Any]:
    arguments = normed(draw, kind, residual)
    width = arguments["x"].shape[-1]
    return arguments | {"weight": arguments["weight"] if weight else None, "bias": draw.normal(width) if bias else None}


def layer_norm_cases(residual: bool) -> Cases:
    return {kind: partial(layer_normed, kind=kind, residual=residual) for kind in ROWS} | {
        "no bias": partial(layer_normed, kind="packed", residual=residual, bias=False),
        "neither weight nor bias": partial(layer_normed, kind="packed", residual=residual, weight=False, bias=False),
    }


def one_process_group() -> str:
    """The name of a group of this process alone."""
    if not distributed.is_initialized():
        distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    assert distributed.group.WORLD is not None
    return distributed.group.WORLD.group_name


def reducing(make: Make) -> Make:
    return lambda draw: make(draw) | {"group": one_process_group()}


def reducing_norm_cases(residual: bool) -> Cases:
    return {name: reducing(make) for name, make in rms_norm_cases(residual).items()}


def padding_cases() -> Cases:
    kinds = {kind: partial(normed, kind=kind, residual=True, columns=64) for kind in (*ROWS, "many")}
    return kinds | {
        "one column": partial(normed, kind="odd sizes", residual=True, columns=1),
        "before, fp32 weight": partial(normed, kind="packed", residual=True, columns=17, style="before",
                                       weight=torch.float32),
    }


# Linear and embedding


def linear(draw: Draw, *shape: int, out: int = 33, bias: bool = False) -> dict[str, Any]:
    weight = draw.normal(out, shape[-1]) / shape[-1] ** 0.5
    return {"x": draw.normal(*shape), "weight": weight, "bias": draw.normal(out) if bias else None}


LINEAR: Cases = {
    "one row": lambda draw: linear(draw, 1, 64),
    "odd sizes": lambda draw: linear(draw, 7, 80, out=33),
    "bias": lambda draw: linear(draw, 33, 64, bias=True),
    "batch": lambda draw: linear(draw, 2, 7, 64, bias=True),
    "one vector": lambda draw: linear(draw, 64),
    "no rows": lambda draw: linear(draw, 0, 64),
    "packed": lambda draw: linear(draw, 1, 64) | {"x": draw.packed(7, 64)[1]},
    "transposed": lambda draw: linear(draw, 1, 64) | {"x": draw.normal(5, 7, 64).transpose(0, 1)},
    "two rows": lambda draw: linear(draw, 2, 64, bias=True),
    "sixteen rows": lambda draw: linear(draw, 16, 80, bias=True),
    "long": lambda draw: linear(draw, 3, 4104, out=17),
    "long, one row": lambda draw: linear(draw, 1, 4104, out=17),
    "wide, one row": lambda draw: linear(draw, 1, 64, out=2050),
    "wide": lambda draw: linear(draw, 5, 64, out=2050),
    "wide, sixteen rows": lambda draw: linear(draw, 16, 64, out=2050),
    "weight of a pack": lambda draw: linear(draw, 7, 64) | {"weight": draw.normal(66, 64)[33:]},
}

EMBEDDING: Cases = {
    "one id": lambda draw: {"ids": draw.below(50, 1), "weight": draw.normal(50, 64)},
    "batch": lambda draw: {"ids": draw.below(50, 2, 7), "weight": draw.normal(50, 80)},
    "int32": lambda draw: {"ids": draw.below(50, 7, dtype=torch.int32), "weight": draw.normal(50, 64)},
    "no ids": lambda draw: {"ids": draw.below(50, 0), "weight": draw.normal(50, 64)},
    "every second id": lambda draw: {"ids": draw.below(50, 14)[::2], "weight": draw.normal(50, 64)},
}


# Rotary positions


def rotary(
    draw: Draw, tokens: int = 7, width: int = 64, rotated: int | None = None, style: str = "neox",
    table: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    columns = (rotated or width) // (1 if style == "neox" else 2)
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
    cases["one token"] = partial(roped, tokens=1)
    cases["narrow"] = partial(roped, tokens=33, width=8, heads=1)
    cases["no tokens"] = partial(roped, tokens=0)
    cases["batch"] = lambda draw: roped(draw) | {"x": draw.normal(2, 7, 4, 64)}
    cases["batch of heads"] = lambda draw: (
        dict(zip(("cos", "sin"), draw.tables(2, 1, 7, 64), strict=True)) | {"x": draw.normal(2, 4, 7, 64)}
    )
    return cases


def qk(draw: Draw, heads: tuple[int, int] = (8, 2), tokens: int = 7, width: int = 64) -> dict[str, Any]:
    return {"q": draw.normal(tokens, heads[0], width), "k": draw.normal(tokens, heads[1], width)}


def qk_weights(draw: Draw, width: int = 64, dtype: torch.dtype | None = None) -> dict[str, Any]:
    return {"q_weight": draw.normal(width, dtype=dtype), "k_weight": draw.normal(width, dtype=dtype), "eps": EPS}


def qk_normed(
    draw: Draw, heads: tuple[int, int] = (8, 2), tokens: int = 7, width: int = 64, packed: bool = False,
    norm_style: str = "after", rope_style: str = "neox", weight: torch.dtype | None = None, **table: Any,
) -> dict[str, Any]:  # fmt: skip
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
        qk_normed(draw) | {"q": draw.normal(8, 7, 64).transpose(0, 1), "k": draw.normal(2, 7, 64).transpose(0, 1)}
    ),
}


# Attention over what is given


def attended(
    draw: Draw, tokens: int = 7, keys: int | None = None, heads: tuple[int, int] = (8, 2), width: int = 64,
    batch: tuple[int, ...] = (), **attributes: Any,
) -> dict[str, Any]:  # fmt: skip
    keys = tokens if keys is None else keys
    return {
        "q": draw.normal(*batch, tokens, heads[0], width),
        "k": draw.normal(*batch, keys, heads[1], width),
        "v": draw.normal(*batch, keys, heads[1], width),
        "scale": width**-0.5,
        **attributes,
    }


def packed_attention(draw: Draw) -> dict[str, Any]:
    q, k, v = draw.heads(33, 8, 2, 2, width=64)
    return {"q": q, "k": k, "v": v, "scale": 0.125}


def heads_before_tokens(draw: Draw) -> dict[str, Any]:
    q, k, v = (draw.normal(2, heads, 7, 64).transpose(1, 2) for heads in (8, 2, 2))
    return {"q": q, "k": k, "v": v, "scale": 0.125}


def bool_mask(draw: Draw, *shape: int) -> Tensor:
    """About a third hidden, and all of row 2."""
    mask = draw.below(3, *shape) > 0
    mask[..., 2, :] = False
    return mask


ATTENTION: Cases = {
    "causal": attended,
    "one token": lambda draw: attended(draw, 1),
    "one token, batch": lambda draw: attended(draw, 1, 33, batch=(2,), causal=False),
    "odd sizes": lambda draw: attended(draw, 33, width=80),
    "several tiles": lambda draw: attended(draw, 200, heads=(4, 2)),
    "widest heads": lambda draw: attended(draw, 65, heads=(2, 1), width=256),
    "causal, fewer keys": lambda draw: attended(draw, 33, 7),
    "as many keys as queries": lambda draw: attended(draw, heads=(4, 4), width=128),
    "one key head, narrow": lambda draw: attended(draw, 33, heads=(6, 1), width=8),
    "batch": lambda draw: attended(draw, batch=(2,)),
    "no tokens": lambda draw: attended(draw, 0),
    "not causal": lambda draw: attended(draw, 7, 33, causal=False),
    "causal, more keys": lambda draw: attended(draw, 7, 33),
    "window": lambda draw: attended(draw, 33, window=5),
    "window longer than the keys": lambda draw: attended(draw, 7, window=64),
    "window, not causal": lambda draw: attended(draw, 33, window=5, causal=False, batch=(2,)),
    "softcap": lambda draw: attended(draw, 33, softcap=2.0),
    "sinks": lambda draw: attended(draw, 33) | {"sinks": draw.normal(8)},
    "sinks, softcap, window, batch": lambda draw: (
        attended(draw, 33, window=5, softcap=2.0, batch=(2,)) | {"sinks": draw.normal(8)}
    ),
    "bool mask": lambda draw: attended(draw, 7, 33, causal=False) | {"mask": bool_mask(draw, 7, 33)},
    "bool mask, causal": lambda draw: attended(draw, 7, batch=(2,)) | {"mask": bool_mask(draw, 2, 1, 7, 7)},
    "bool mask of each head": lambda draw: attended(draw, 7) | {"mask": bool_mask(draw, 8, 7, 7)},
    "bool mask, window": lambda draw: attended(draw, 33, window=5) | {"mask": bool_mask(draw, 1, 33, 33)},
    "float mask": lambda draw: attended(draw, 7, 33, causal=False) | {"mask": draw.normal(7, 33)},
    "float mask, causal": lambda draw: attended(draw, 7, batch=(2,)) | {"mask": draw.normal(2, 1, 7, 7)},
    "float mask that hides a row": lambda draw: (
        attended(draw, 7, 33, causal=False)
        | {"mask": draw.normal(7, 33).masked_fill(~bool_mask(draw, 7, 33), float("-inf"))}
    ),
    "fp32 mask": lambda draw: attended(draw, 7) | {"mask": draw.normal(1, 7, 7, dtype=torch.float32)},
    "smallest number as mask": lambda draw: (
        attended(draw, 7, causal=False)
        | {"mask": torch.zeros(7, 7, device=draw.device).masked_fill(~bool_mask(draw, 7, 7), torch.finfo().min)}
    ),
    "values narrower than keys": lambda draw: attended(draw) | {"v": draw.normal(7, 2, 32)},
    "packed": packed_attention,
    "heads before tokens": heads_before_tokens,
    "with a handle": lambda draw: attended(draw) | {"kv": draw.normal(0, 2, 64)},
}


# State: writes, and attention over a cache


def written(
    draw: Draw, positions: list[range], heads: int = 2, width: int = 64, skip: tuple[int, ...] = (),
    cache: torch.dtype | None = None,
) -> dict[str, Any]:  # fmt: skip
    """New tokens at these positions of as many sequences; rows `skip` are written nowhere."""
    k_cache, v_cache, blocks = draw.caches([p.stop for p in positions], heads, width, cache)
    slots = [slot for own, p in zip(blocks, positions, strict=True) for slot in slots_of(own, p, k_cache.shape[1])]
    slots = [-1 if t in skip else slot for t, slot in enumerate(slots)]
    k, v = draw.normal(len(slots), heads, width), draw.normal(len(slots), heads, width)
    return {"k": k, "v": v, "k_cache": k_cache, "v_cache": v_cache, "slots": draw.ints(slots)}


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
        written(draw, [range(9, 16)]) | dict(zip(("v", "v_cache"), narrow_values(draw), strict=True))
    ),
    "one head, narrow": lambda draw: written(draw, [range(0, 33)], heads=1, width=8),
    "odd width": lambda draw: written(draw, [range(15, 18)], heads=4, width=80),
    "packed": lambda draw: (
        written(draw, [range(9, 16)]) | dict(zip(("k", "v"), draw.heads(7, 8, 2, 2, width=64)[1:], strict=True))
    ),
    "batch": lambda draw: (
        written(draw, [range(9, 16), range(0, 7)]) | {"k": draw.normal(2, 7, 2, 64), "v": draw.normal(2, 7, 2, 64)}
    ),
    "fp8": lambda draw: written(draw, [range(9, 42), range(0, 3)], skip=(0, 7), cache=E4M3),
    "fp8 with scales": lambda draw: written(draw, [range(9, 42), range(0, 3)], skip=(2,), cache=E4M3) | cache_scales(draw),
    "wider than the cache": lambda draw: (
        written(draw, [range(9, 16)]) | {"k": draw.normal(7, 2, 64, dtype=torch.float32)}
    ),
}


def rope_written(
    draw: Draw, tokens: int = 7, heads: tuple[int, int] = (8, 2), width: int = 64, skip: tuple[int, ...] = (),
    packed: bool = False, rope_style: str = "neox", cache: torch.dtype | None = None, **table: Any,
) -> dict[str, Any]:  # fmt: skip
    arguments = written(draw, [range(12, 12 + tokens)], heads[1], width, skip, cache)
    arguments["q"] = draw.normal(tokens, heads[0], width)
    if packed:
        arguments |= zip(("q", "k", "v"), draw.heads(tokens, *heads, heads[1], width=width), strict=True)
    cos, sin = rotary(draw, tokens, width, style=rope_style, **table)
    return arguments | {"cos": cos, "sin": sin, "rope_style": rope_style}


ROPE_KV_WRITE: Cases = {
    **{style: partial(rope_written, rope_style=style) for style in ROPE_STYLES},
    **{
        f"{style}, packed, partial": partial(rope_written, packed=True, width=80, rotated=32, rope_style=style)
        for style in ROPE_STYLES
    },
    "one token": partial(rope_written, tokens=1),
    "no tokens": partial(rope_written, tokens=0),
    "many tokens": partial(rope_written, tokens=450),
    "some nowhere": partial(rope_written, tokens=33, skip=(0, 4, 32)),
    "as many keys as queries": partial(rope_written, heads=(4, 4), width=128),
    "one key head, narrow": partial(rope_written, heads=(6, 1), width=8),
    "fp32 tables": partial(rope_written, table=torch.float32),
    "heads before tokens": lambda draw: rope_written(draw) | {"q": draw.normal(8, 7, 64).transpose(0, 1)},
    "heads before tokens, partial": lambda draw: (
        rope_written(draw, rotated=32) | {"q": draw.normal(8, 7, 64).transpose(0, 1)}
    ),
}


def norm_rope_written(
    draw: Draw, norm_style: str = "after", weight: torch.dtype | None = None, **rest: Any
) -> dict[str, Any]:
    arguments = rope_written(draw, **rest)
    return arguments | qk_weights(draw, arguments["q"].shape[-1], weight) | {"norm_style": norm_style}


QK_NORM_ROPE_KV_WRITE: Cases = {
    **{
        f"{norm}, {rope}": partial(norm_rope_written, norm_style=norm, rope_style=rope)
        for norm in RMS_NORM_STYLES
        for rope in ROPE_STYLES
    },
    "packed": partial(norm_rope_written, packed=True),
    "packed, partial": partial(norm_rope_written, packed=True, width=80, rotated=32, rope_style="half"),
    "one token": partial(norm_rope_written, tokens=1),
    "no tokens": partial(norm_rope_written, tokens=0),
    "some nowhere": partial(norm_rope_written, tokens=33, skip=(0, 4, 32)),
    "as many keys as queries": partial(norm_rope_written, heads=(4, 4), width=128),
    "one key head, narrow": partial(norm_rope_written, heads=(6, 1), width=8),
    "fp32 weight": partial(norm_rope_written, weight=torch.float32),
    "fp32 tables": partial(norm_rope_written, table=torch.float32),
}


E4M3FNUZ = torch.float8_e4m3fnuz
FP8_WRITES: dict[str, Any] = {
    "fp8": dict(cache=E4M3),
    "fp8, packed, partial": dict(cache=E4M3, packed=True, width=80, rotated=32, rope_style="half"),
    "e4m3fnuz, some nowhere": dict(cache=E4M3FNUZ, tokens=33, skip=(0, 4, 32)),
}


def with_cache_scales(make: Make) -> Make:
    return lambda draw: make(draw) | cache_scales(draw)


for name, how in FP8_WRITES.items():
    ROPE_KV_WRITE |= {name: partial(rope_written, **how),
                      f"{name}, scales": with_cache_scales(partial(rope_written, **how))}  # fmt: skip
    QK_NORM_ROPE_KV_WRITE |= {name: partial(norm_rope_written, **how),
                              f"{name}, scales": with_cache_scales(partial(norm_rope_written, **how))}  # fmt: skip


def paged(
    draw: Draw, sequences: list[tuple[int, int]], heads: tuple[int, int] = (8, 2), width: int = 64, padding: int = 0,
    cache: torch.dtype | None = None, **attributes: Any,
) -> dict[str, Any]:  # fmt: skip
    """Sequences of (new tokens, length) over caches that hold their keys, and rows of no sequence behind them."""
    lengths = [length for _, length in sequences]
    k_cache, v_cache, blocks = draw.caches(lengths, heads[1], width, cache)
    block_size = k_cache.shape[1]
    for own, length in zip(blocks, lengths, strict=True):
        slots = draw.ints(slots_of(own, range(length), block_size))
        for state in (k_cache, v_cache):
            state[slots // block_size, slots % block_size] = draw.normal(length, heads[1], width).to(state.dtype)
    starts = torch.tensor([0] + [new for new, _ in sequences]).cumsum(0)
    return {
        "q": draw.normal(int(starts[-1]) + padding, heads[0], width),
        "k_cache": k_cache,
        "v_cache": v_cache,
        "query_start": starts.to(torch.int32).to(draw.device),
        "seq_lens": draw.ints(lengths, torch.int32),
        "block_tables": torch.tensor(blocks, dtype=torch.int32, device=draw.device),
        "token": draw.normal(0),
        "scale": width**-0.5,
        **attributes,
    }


DECODE = [(1, 5), (1, 33), (1, 16), (1, 17), (1, 1)]
PREFILL = [(7, 7), (33, 33), (1, 1)]
CHUNKS = [(7, 20), (16, 33), (3, 4)]
MIXED = [(1, 40), (0, 9), (33, 33), (4, 21), (0, 0)]

PAGED_ATTENTION: Cases = {
    "decode": lambda draw: paged(draw, DECODE),
    "one sequence": lambda draw: paged(draw, [(1, 300)]),
    "prefill": lambda draw: paged(draw, PREFILL),
    "chunks": lambda draw: paged(draw, CHUNKS),
    "drafts": lambda draw: paged(draw, [(4, 33), (4, 4), (4, 18)]),
    "mixed, some without new tokens": lambda draw: paged(draw, MIXED),
    "padding rows": lambda draw: paged(draw, MIXED, padding=3),
    "padding rows only": lambda draw: paged(draw, [(0, 9)], padding=3),
    "several tiles": lambda draw: paged(draw, [(70, 300), (1, 290), (150, 150)], heads=(4, 2)),
    "as many keys as queries, decode": lambda draw: paged(draw, DECODE, heads=(4, 4), width=128),
    "as many keys as queries": lambda draw: paged(draw, MIXED, heads=(4, 4), width=80),
    "one key head, narrow": lambda draw: paged(draw, MIXED, heads=(6, 1), width=8),
    "window, decode": lambda draw: paged(draw, DECODE, window=6),
    "window": lambda draw: paged(draw, MIXED, window=6),
    "window of whole blocks": lambda draw: paged(draw, MIXED, window=16),
    "window longer than the keys": lambda draw: paged(draw, MIXED, window=64),
    "softcap": lambda draw: paged(draw, MIXED, softcap=2.0),
    "sinks, decode": lambda draw: paged(draw, DECODE) | {"sinks": draw.normal(8)},
    "sinks": lambda draw: paged(draw, MIXED) | {"sinks": draw.normal(8)},
    "sinks, softcap, window": lambda draw: paged(draw, MIXED, softcap=2.0, window=6) | {"sinks": draw.normal(8)},
    "fp8": lambda draw: paged(draw, MIXED, cache=E4M3),
    "fp8 with scales, decode": lambda draw: paged(draw, DECODE, cache=E4M3) | cache_scales(draw),
    "fp8 with scales": lambda draw: paged(draw, MIXED, cache=E4M3, window=6) | cache_scales(draw),
    "fp8 with scales, softcap": lambda draw: paged(draw, MIXED, cache=E4M3, softcap=2.0) | cache_scales(draw),
    "e4m3fnuz with scales": lambda draw: paged(draw, CHUNKS, cache=E4M3FNUZ) | cache_scales(draw),
    "packed": lambda draw: paged(draw, CHUNKS) | {"q": draw.heads(26, 8, 2, 2, width=64)[0]},
    "batch of one": lambda draw: paged(draw, CHUNKS) | {"q": draw.normal(1, 26, 8, 64)},
}


# Quantizing, and linear layers in few bits


def rows_to_quantize(draw: Draw, kind: str, **attributes: Any) -> dict[str, Any]:
    """One tensor [..., K], among its values zeros, and numbers on the border between two codes."""
    x = row_inputs(draw, kind)[0]
    if x.numel():
        x[..., ::7] = x[..., ::7].mul(8).round().div(8)
    return {"x": x, **attributes}


def with_a_row_of(draw: Draw, value: float, *shape: int) -> Tensor:
    x = draw.normal(*shape)
    x[..., 1, :] = value
    return x


def quant_cases(kinds: tuple[str, ...], width: int, **attributes: Any) -> Cases:
    return {
        **{kind: partial(rows_to_quantize, kind=kind, **attributes) for kind in kinds},
        "a row of zeros": lambda draw: {"x": with_a_row_of(draw, 0.0, 3, width), **attributes},
        "a tiny row": lambda draw: {"x": with_a_row_of(draw, 2.0**-24, 3, width), **attributes},
        "negative": lambda draw: {"x": -draw.normal(3, width).abs(), **attributes},
        "large": lambda draw: {"x": draw.normal(3, width) * 5000, **attributes},
        "an outlier": lambda draw: {"x": with_a_row_of(draw, 0.01, 3, width).index_fill_(-1, draw.ints([5]), 300.0)}
        | attributes,
        "batch": lambda draw: {"x": draw.normal(2, 5, width), **attributes},
    }


MX_ROWS = ("one row", "no rows", "one vector", "packed", "heads of a packed projection", "transposed")
FNUZ = {"dtype": torch.float8_e4m3fnuz}


def quant_fp8_group_cases() -> Cases:
    cases = quant_cases((*ROWS, "many"), 384)
    for name in ("one row", "odd sizes", "no rows", "wide", "transposed"):
        cases[f"{name}, column-major"] = partial(rows_to_quantize, kind=name, column_major_scales=True)
    cases["batch, column-major"] = lambda draw: {"x": draw.normal(2, 5, 384), "column_major_scales": True}
    cases["groups of 64"] = lambda draw: {"x": draw.normal(5, 384), "group": 64}
    cases["fnuz"] = lambda draw: {"x": draw.normal(5, 384), **FNUZ}
    return cases


def every_size(draw: Draw) -> dict[str, Any]:
    """Groups whose scale is 1, of all numbers up to 6 of 16 bits; of fp32, those of fp16 and their neighbours."""
    half = draw.dtype if draw.dtype.itemsize == 2 else torch.float16
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(half)
    numbers = numbers[numbers.abs() <= 6].to(draw.dtype)
    if draw.dtype == torch.float32:
        numbers = torch.cat([numbers, *(numbers.nextafter(torch.full_like(numbers, end)) for end in (-6.0, 6.0))])
    rows = torch.cat([numbers, numbers[: -len(numbers) % 31]]).view(-1, 31)
    return {"x": torch.nn.functional.pad(rows, (1, 0), value=6.0).to(draw.device)}


def quant_mxfp4_cases() -> Cases:
    cases: Cases = {"every size": every_size}
    for rounding in MX_ROUNDINGS:
        for name, make in quant_cases(MX_ROWS, 96, rounding=rounding).items():
            cases[f"{name}, {rounding}"] = make
        cases[f"many, {rounding}"] = lambda draw, rounding=rounding: {"x": draw.normal(2050, 64), "rounding": rounding}
    return cases


QUANT_FP8_STATIC: Cases = {
    name: lambda draw, make=make: make(draw) | {"scale": draw.normal(1, dtype=torch.float32).abs() / 50}
    for name, make in (quant_cases((*ROWS, "many"), 128) | {
        "fnuz": lambda draw: {"x": draw.normal(5, 128), **FNUZ},
    }).items()
}  # fmt: skip


def fp8_operands(
    draw: Draw, *shape: int, out: int = 33, bias: bool = False, dtype: torch.dtype = torch.float8_e4m3fn
) -> dict[str, Any]:
    """Operands of a linear layer in fp8, without scales."""
    return {
        "x": (draw.normal(*shape) * 20).to(dtype),
        "weight": (draw.normal(out, shape[-1]) * 20).to(dtype),
        "bias": draw.normal(out) if bias else None,
        "out_dtype": draw.dtype,
    }


def scale_of(draw: Draw, *shape: int) -> Tensor:
    return (draw.normal(*shape, dtype=torch.float32).abs() + 0.1) / 400


def scaled_fp8(draw: Draw, *shape: int, per: str = "row", out: int = 33, **rest: Any) -> dict[str, Any]:
    scales = {"x_scale": scale_of(draw, 1), "weight_scale": scale_of(draw, 1)}
    if per == "row":
        scales = {"x_scale": scale_of(draw, *shape[:-1], 1), "weight_scale": scale_of(draw, out, 1)}
    elif per == "token":
        scales["x_scale"] = scale_of(draw, *shape[:-1], 1)
    return fp8_operands(draw, *shape, out=out, **rest) | scales


def scaled_blocks(draw: Draw, *shape: int, out: int = 160, **rest: Any) -> dict[str, Any]:
    blocks = -(-shape[-1] // 128)
    scales = {"x_scale": scale_of(draw, *shape[:-1], blocks), "weight_scale": scale_of(draw, -(-out // 128), blocks)}
    return fp8_operands(draw, *shape, out=out, **rest) | scales


def int8_operands(draw: Draw, *shape: int, out: int = 33, bias: bool = False) -> dict[str, Any]:
    return {
        "x": (draw.below(255, *shape) - 127).to(torch.int8),
        "weight": (draw.below(255, out, shape[-1]) - 127).to(torch.int8),
        "x_scale": scale_of(draw, *shape[:-1], 1),
        "weight_scale": scale_of(draw, out, 1),
        "bias": draw.normal(out) if bias else None,
        "out_dtype": draw.dtype,
    }


def int4_operands(
    draw: Draw, *shape: int, out: int = 33, group: int = 32, zeros: bool = False, bias: bool = False
) -> dict[str, Any]:
    groups = shape[-1] // group
    return {
        "x": draw.normal(*shape),
        "weight": pack_int4(draw.below(16, out, shape[-1])),
        "weight_scale": scale_of(draw, out, groups).to(draw.dtype),
        "zeros": draw.below(16, out, groups, dtype=torch.uint8) if zeros else None,
        "bias": draw.normal(out) if bias else None,
        "group": group,
    }


def mxfp4_operands(
    draw: Draw, *shape: int, out: int = 33, activation: str = "16 bits", bias: bool = False
) -> dict[str, Any]:
    lead, width = shape[:-1], shape[-1]
    x, x_scale = draw.normal(*shape), None
    if activation == "mxfp4":
        x = draw.below(256, *lead, width // 2, dtype=torch.uint8)
        x_scale = 120 + draw.below(12, *lead, width // 32, dtype=torch.uint8)
    elif activation.startswith("fp8"):
        x = (draw.normal(*shape) * 20).to(torch.float8_e4m3fn)
        x_scale = scale_of(draw, *lead, 1) if activation == "fp8 per token" else scale_of(draw, 1)
    return {
        "x": x,
        "weight": draw.below(256, out, width // 2, dtype=torch.uint8),
        "weight_scale": 115 + draw.below(12, out, width // 32, dtype=torch.uint8),
        "x_scale": x_scale,
        "bias": draw.normal(out) if bias else None,
        "out_dtype": draw.dtype,
    }


def linear_shapes(make: Callable[..., dict[str, Any]], width: int = 128, **rest: Any) -> Cases:
    """The shapes that a GEMM must take: no row, one, a few, many; outputs that fill no tile."""
    return {
        "one row": partial(_linear_shape, make, (1, width), rest),
        "odd sizes": partial(_linear_shape, make, (7, width), rest | {"out": 33}),
        "bias": partial(_linear_shape, make, (33, width), rest | {"bias": True}),
        "batch": partial(_linear_shape, make, (2, 5, width), rest | {"bias": True}),
        "one vector": partial(_linear_shape, make, (width,), rest),
        "no rows": partial(_linear_shape, make, (0, width), rest),
        "sixteen rows": partial(_linear_shape, make, (16, width), rest | {"out": 64}),
        "long": partial(_linear_shape, make, (3, 33 * 128), rest | {"out": 48}),
        "many rows": partial(_linear_shape, make, (150, width), rest | {"out": 272}),
    }


def _linear_shape(
    make: Callable[..., dict[str, Any]], shape: tuple[int, ...], rest: dict[str, Any], draw: Draw
) -> dict[str, Any]:
    return make(draw, *shape, **rest)


# Norms and activations that quantize their result


def quantizing(scheme: str, make: Make) -> Make:
    """The case with a quantizer at its end."""

    def made(draw: Draw) -> dict[str, Any]:
        scale = torch.tensor([0.02], device=draw.device) if scheme == "fp8_static" else None
        return make(draw) | {"scale": scale, "scheme": scheme}

    return made


def quantizing_cases(make: Callable[..., dict[str, Any]], **attributes: Any) -> Cases:
    """`make(draw, kind=...)` under every scheme; attributes of one case each, by name."""
    cases: Cases = {}
    for scheme in SCHEMES:
        kinds = MX_ROWS if scheme == "mxfp4" else (*ROWS, "many")
        cases |= {f"{scheme}, {kind}": quantizing(scheme, partial(make, kind=kind)) for kind in kinds}
        for name, more in attributes.items():
            cases[f"{scheme}, {name}"] = quantizing(scheme, partial(make, kind="packed", **more))
    one = partial(make, kind="packed")
    for scheme in ("fp8_static", "fp8_per_token", "fp8_group"):
        cases[f"{scheme}, fnuz"] = lambda draw, scheme=scheme: quantizing(scheme, one)(draw) | FNUZ
    cases["fp8_group, column-major"] = lambda draw: quantizing("fp8_group", one)(draw) | {"column_major": True}
    cases["fp8_group, groups of 64"] = lambda draw: quantizing("fp8_group", one)(draw) | {"group": 64}
    cases["mxfp4, rounded up"] = lambda draw: quantizing("mxfp4", one)(draw) | {"rounding": "up"}
    return cases


def norm_quant_cases(residual: bool) -> Cases:
    styles = {f"{style}, {dtype or 'model dtype'} weight": {"style": style, "weight": dtype}
              for style in RMS_NORM_STYLES for dtype in (None, torch.float32)}  # fmt: skip
    kept = {"kept": {"keep": True}, "kept, one_plus": {"keep": True, "style": "one_plus"}}
    return quantizing_cases(partial(normed, residual=residual), **styles, **kept, large={"scale": 200.0})


SCALED_LINEAR_FP8: Cases = {
    **linear_shapes(scaled_fp8),
    "per tensor": lambda draw: scaled_fp8(draw, 7, 128, per="tensor"),
    "per tensor, one row, bias": lambda draw: scaled_fp8(draw, 1, 64, per="tensor", out=272, bias=True),
    "per token, a tensor of weights": lambda draw: scaled_fp8(draw, 5, 128, per="token"),
    "width of no multiple of 16": lambda draw: scaled_fp8(draw, 5, 72, out=40),
    "fnuz": lambda draw: scaled_fp8(draw, 5, 128, dtype=torch.float8_e4m3fnuz),
}
SCALED_LINEAR_FP8_BLOCK: Cases = {
    **linear_shapes(scaled_blocks, 256),
    "blocks that are not full": lambda draw: scaled_blocks(draw, 5, 208, out=144),
    "one block": lambda draw: scaled_blocks(draw, 5, 64, out=48),
    "fnuz": lambda draw: scaled_blocks(draw, 5, 128, dtype=torch.float8_e4m3fnuz),
    "column-major scales": lambda draw: (
        scaled_blocks(draw, 16, 384, out=144) | {"x_scale": scale_of(draw, 3, 16).t()}
    ),
}
SCALED_LINEAR_INT8: Cases = {
    **linear_shapes(int8_operands),
    "width of no multiple of 16": lambda draw: int8_operands(draw, 5, 72, out=40),
}
LINEAR_W4A16: Cases = {
    **linear_shapes(int4_operands),
    "groups of 128": lambda draw: int4_operands(draw, 5, 256, group=128),
    "one group": lambda draw: int4_operands(draw, 5, 128, group=128),
    "zero points": lambda draw: int4_operands(draw, 5, 128, zeros=True),
    "zero points, one row, bias": lambda draw: int4_operands(draw, 1, 256, group=128, out=64, zeros=True, bias=True),
}
LINEAR_MXFP4: Cases = {
    **linear_shapes(mxfp4_operands),
    **{
        f"{name}, {activation}": make
        for activation in ("mxfp4", "fp8", "fp8 per token")
        for name, make in linear_shapes(mxfp4_operands, activation=activation).items()
        if name in ("one row", "odd sizes", "bias", "batch", "no rows", "many rows")
    },
}


# Latent attention. T tokens, H heads, L latent width, R rotated width, P and V what is not rotated of a key and a value.


def side_by_side(draw: Draw, *lead: int, widths: list[int]) -> tuple[Tensor, ...]:
    """Parts of one tensor. (torch.library's check cannot clone such parts without elements.)"""
    parts = draw.normal(*lead, sum(widths)).split(widths, -1)
    return parts if 0 not in lead else tuple(part.clone(memory_format=torch.contiguous_format) for part in parts)


def latent_written(
    draw: Draw, tokens: int = 7, latent: int = 48, rotated: int = 16, skip: tuple[int, ...] = (),
    cache: torch.dtype | None = None, batch: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """The latent and the rotated key of new tokens, cut from one projection, and the cache that they go to."""
    k_cache, _, [blocks] = draw.caches([12 + tokens], 1, latent + rotated, cache)
    slots = slots_of(blocks, range(12, 12 + tokens), k_cache.shape[1])
    kv_c, k_pe = side_by_side(draw, *([1] if batch else []), tokens, widths=[latent, rotated])
    arguments = {"kv_c": kv_c, "k_pe": k_pe.unsqueeze(-2), "kv_cache": k_cache.squeeze(2),
                 "slots": draw.ints([-1 if t in skip else slot for t, slot in enumerate(slots)])}  # fmt: skip
    return arguments | ({} if cache is None else {"scale": cache_scales(draw)["k_scale"]})


def latent_rope_written(
    draw: Draw, tokens: int = 7, heads: int = 6, nope: int | None = None, rope_style: str = "half",
    table: torch.dtype | None = None, **rest: Any,
) -> dict[str, Any]:  # fmt: skip
    arguments = latent_written(draw, tokens, **rest)
    latent, rotated = arguments["kv_c"].shape[-1], arguments["k_pe"].shape[-1]
    q_nope, q_pe = side_by_side(draw, *arguments["kv_c"].shape[:-1], heads, widths=[nope or latent, rotated])
    cos, sin = rotary(draw, tokens, rotated, style=rope_style, table=table)
    return arguments | {"q_nope": q_nope, "q_pe": q_pe, "cos": cos, "sin": sin, "rope_style": rope_style}


LATENT_WRITES: dict[str, Any] = {
    "several tokens": {},
    "one token": dict(tokens=1),
    "no tokens": dict(tokens=0),
    "many tokens": dict(tokens=70, latent=20, rotated=8),
    "some nowhere": dict(tokens=33, skip=(0, 4, 32)),
    "odd widths": dict(latent=40, rotated=12),
    "batch of one": dict(batch=True),
    "fp8": dict(cache=E4M3, tokens=33, skip=(3,)),
    "e4m3fnuz": dict(cache=E4M3FNUZ),
}
MLA_KV_WRITE: Cases = {name: partial(latent_written, **how) for name, how in LATENT_WRITES.items()}
MLA_ROPE_KV_WRITE: Cases = {
    **{name: partial(latent_rope_written, **how) for name, how in LATENT_WRITES.items()},
    **{style: partial(latent_rope_written, rope_style=style) for style in ROPE_STYLES},
    "fp32 tables": partial(latent_rope_written, table=torch.float32),
}


def bmm_operands(draw: Draw, scheme: str, heads: int, latent: int, nope: int, dtype: torch.dtype = E4M3) -> dict[str, Any]:
    """The weight of each head, and its scales."""
    if scheme == "mxfp4":
        return {"weight": draw.below(256, heads, latent, nope // 2, dtype=torch.uint8),
                "weight_scale": 115 + draw.below(12, heads, latent, nope // 32, dtype=torch.uint8)}  # fmt: skip
    return {"weight": (draw.normal(heads, latent, nope) * 20).to(dtype), "weight_scale": scale_of(draw, 1)}


def multiplied(draw: Draw, scheme: str, tokens: int = 7, batch: tuple[int, ...] = (), nope: int = 64) -> dict[str, Any]:
    operands = bmm_operands(draw, scheme, 3, 40, nope)
    shape = (*batch, tokens, 3)
    if scheme == "mxfp4":
        operands |= {"x": draw.below(256, *shape, nope // 2, dtype=torch.uint8),
                     "x_scale": 120 + draw.below(12, *shape, nope // 32, dtype=torch.uint8)}  # fmt: skip
    else:
        operands |= {"x": (draw.normal(*shape, nope) * 20).to(E4M3), "x_scale": scale_of(draw, *shape, -(-nope // 128))}
    return operands | {"out_dtype": draw.dtype}


def multiplied_and_written(
    draw: Draw, scheme: str = "fp8", heads: int = 6, nope: int = 64, latent: int = 48, dtype: torch.dtype = E4M3,
    attributes: dict[str, Any] | None = None, **rest: Any,
) -> dict[str, Any]:  # fmt: skip
    arguments = latent_rope_written(draw, heads=heads, nope=nope, latent=latent, **rest)
    arguments |= bmm_operands(draw, scheme, heads, latent, nope, dtype) | {"scheme": scheme, **(attributes or {})}
    return arguments | ({"dtype": dtype} if scheme == "fp8" else {})


SCALED_BMM_FP8: Cases = {
    "several tokens": lambda draw: multiplied(draw, "fp8"),
    "batch": lambda draw: multiplied(draw, "fp8", batch=(2,)),
    "two groups": lambda draw: multiplied(draw, "fp8", nope=192),
}
BMM_MXFP4: Cases = {
    "several tokens": lambda draw: multiplied(draw, "mxfp4"),
    "batch": lambda draw: multiplied(draw, "mxfp4", batch=(2,)),
}
BMM_ROPE_KV_WRITE: Cases = {
    f"{scheme}, {name}": partial(multiplied_and_written, scheme=scheme, **how)
    for scheme in ("fp8", "mxfp4")
    for name, how in {
        "several tokens": {},
        "one token": dict(tokens=1),
        "no tokens": dict(tokens=0),
        "several tiles": dict(tokens=33, latent=100, heads=2, skip=(3,)),
        "two groups": dict(nope=192),
        "batch of one": dict(batch=True),
        "fp8 cache": dict(cache=E4M3),
    }.items()
} | {
    "mxfp4, rounded up": partial(multiplied_and_written, scheme="mxfp4", attributes={"rounding": "up"}),
    "e4m3fnuz": partial(multiplied_and_written, dtype=E4M3FNUZ, cache=E4M3FNUZ),
    "groups of 32": partial(multiplied_and_written, attributes={"group": 32}),
    "neox": partial(multiplied_and_written, rope_style="neox"),
}


def split_and_joined(
    draw: Draw, scheme: str, tokens: int = 7, heads: int = 3, nope: int = 24, values: int = 40, latent: int = 160,
    heads_first: bool = False, per: str = "row", **rest: Any,
) -> dict[str, Any]:  # fmt: skip
    shape = (1, 1, tokens) if heads_first else (tokens,)
    out = heads * (nope + values)
    if scheme == "mxfp4":
        operands = mxfp4_operands(draw, *shape, latent, out=out, activation="mxfp4")
    else:
        make = scaled_blocks if scheme == "fp8_block" else partial(scaled_fp8, per=per)
        operands = make(draw, *shape, latent, out=out, **rest)
    operands.pop("bias")
    rotated = draw.normal(*shape, 16).transpose(1, 2) if heads_first else draw.normal(tokens, 1, 16)
    k_pe = rotated.expand(*rotated.shape[:-2], heads, 16)
    return operands | {"k_pe": k_pe, "nope": nope, "scheme": scheme}


LINEAR_SPLIT_CAT: Cases = {
    f"{scheme}, {name}": partial(split_and_joined, scheme=scheme, **how)
    for scheme in ("fp8", "fp8_block", "mxfp4")
    for name, how in {
        "several tokens": {},
        "one token": dict(tokens=1),
        "no tokens": dict(tokens=0),
        "several tiles": dict(tokens=70, heads=5, nope=8, values=24),
        "from a stock layer": dict(heads_first=True),
    }.items()
} | {
    "fp8, one scale for all": partial(split_and_joined, scheme="fp8", per="tensor"),
    "fp8, one scale for the weight": partial(split_and_joined, scheme="fp8", per="token"),
    "fp8_block, e4m3fnuz": partial(split_and_joined, scheme="fp8_block", dtype=E4M3FNUZ),
}


CASES: dict[str, Cases] = {
    "silu_and_mul": {kind: partial(gated, kind=kind) for kind in ROWS},
    "gelu_and_mul": {kind: partial(gated, kind=kind) for kind in ROWS}
    | {"tanh": partial(gated, kind="packed", approximate="tanh")},
    "rms_norm": rms_norm_cases(residual=False),
    "add_rms_norm": rms_norm_cases(residual=True),
    "layer_norm": layer_norm_cases(residual=False),
    "add_layer_norm": layer_norm_cases(residual=True),
    "linear": LINEAR,
    "add_rms_norm_pad": padding_cases(),
    "all_reduce": {kind: reducing(lambda draw, kind=kind: {"x": row_inputs(draw, kind)[0]}) for kind in ROWS},
    "allreduce_rms_norm": reducing_norm_cases(residual=False),
    "allreduce_add_rms_norm": reducing_norm_cases(residual=True),
    "rms_norm_quant": norm_quant_cases(residual=False),
    "add_rms_norm_quant": norm_quant_cases(residual=True),
    "silu_and_mul_quant": quantizing_cases(gated),
    "quant_fp8_static": QUANT_FP8_STATIC,
    "quant_fp8_per_token": quant_cases((*ROWS, "many"), 128)
    | {"fnuz": lambda draw: {"x": draw.normal(5, 128), **FNUZ}},
    "quant_fp8_group": quant_fp8_group_cases(),
    "quant_int8_per_token": quant_cases((*ROWS, "many"), 128),
    "quant_mxfp4": quant_mxfp4_cases(),
    "scaled_linear_fp8": SCALED_LINEAR_FP8,
    "scaled_linear_fp8_block": SCALED_LINEAR_FP8_BLOCK,
    "scaled_linear_int8": SCALED_LINEAR_INT8,
    "linear_w4a16": LINEAR_W4A16,
    "linear_mxfp4": LINEAR_MXFP4,
    "embedding": EMBEDDING,
    "rope": rope_cases(),
    "qk_norm_rope": QK_NORM_ROPE,
    "attention": ATTENTION,
    "kv_write": KV_WRITE,
    "rope_kv_write": ROPE_KV_WRITE,
    "qk_norm_rope_kv_write": QK_NORM_ROPE_KV_WRITE,
    "paged_attention": PAGED_ATTENTION,
    "mla_kv_write": MLA_KV_WRITE,
    "mla_rope_kv_write": MLA_ROPE_KV_WRITE,
    "scaled_bmm_fp8": SCALED_BMM_FP8,
    "bmm_mxfp4": BMM_MXFP4,
    "bmm_rope_kv_write": BMM_ROPE_KV_WRITE,
    "linear_split_cat": LINEAR_SPLIT_CAT,
}
