"""Latent attention. H heads, L latent width, R rotated width, P and V what is not rotated of a key
and a value.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from atomc.ops.rope import ROPE_STYLES
from kernel_cases.attention import CHUNKS, DECODE, MIXED, PREFILL, paged
from kernel_cases.draw import E4M3, E4M3FNUZ, Cases, Draw, cache_scales, slots_of
from kernel_cases.indexer import chosen_rows
from kernel_cases.rope import rotary
from kernel_cases.scaled_linear import (
    int4_operands,
    int8_operands,
    mxfp4_operands,
    scale_of,
    scaled_blocks,
    scaled_fp8,
)


def side_by_side(draw: Draw, *lead: int, widths: list[int]) -> tuple[Tensor, ...]:
    """Parts of one tensor. (torch.library's check cannot clone such parts without elements.)"""
    parts = draw.normal(*lead, sum(widths)).split(widths, -1)
    return (
        parts
        if 0 not in lead
        else tuple(part.clone(memory_format=torch.contiguous_format) for part in parts)
    )


def latent_written(
    draw: Draw,
    tokens: int = 7,
    latent: int = 48,
    rotated: int = 16,
    skip: tuple[int, ...] = (),
    cache: torch.dtype | None = None,
    batch: bool = False,
) -> dict[str, Any]:
    """The latent and the rotated key of new tokens, cut from one projection, and the cache that
    they go to.
    """
    k_cache, _, [blocks] = draw.caches([12 + tokens], 1, latent + rotated, cache)
    slots = slots_of(blocks, range(12, 12 + tokens), k_cache.shape[1])
    kv_c, k_pe = side_by_side(draw, *([1] if batch else []), tokens, widths=[latent, rotated])
    arguments = {
        "kv_c": kv_c,
        "k_pe": k_pe.unsqueeze(-2),
        "kv_cache": k_cache.squeeze(2),
        "slots": draw.ints([-1 if t in skip else slot for t, slot in enumerate(slots)]),
    }
    return arguments | ({} if cache is None else {"scale": cache_scales(draw)["k_scale"]})


def latent_rope_written(
    draw: Draw,
    tokens: int = 7,
    heads: int = 6,
    nope: int | None = None,
    rope_style: str = "half",
    table: torch.dtype | None = None,
    **rest: Any,
) -> dict[str, Any]:
    arguments = latent_written(draw, tokens, **rest)
    latent, rotated = arguments["kv_c"].shape[-1], arguments["k_pe"].shape[-1]
    q_nope, q_pe = side_by_side(
        draw, *arguments["kv_c"].shape[:-1], heads, widths=[nope or latent, rotated]
    )
    cos, sin = rotary(draw, tokens, rotated, style=rope_style, table=table)
    return arguments | {
        "q_nope": q_nope,
        "q_pe": q_pe,
        "cos": cos,
        "sin": sin,
        "rope_style": rope_style,
    }


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
    "queries narrower than the latent": partial(latent_rope_written, nope=20),
    "queries wider than the latent": partial(latent_rope_written, nope=72, latent=40),
}


def bmm_operands(
    draw: Draw, scheme: str, heads: int, latent: int, nope: int, dtype: torch.dtype = E4M3
) -> dict[str, Any]:
    """The weight of each head, and its scales."""
    if scheme == "mxfp4":
        return {
            "weight": draw.below(256, heads, latent, nope // 2, dtype=torch.uint8),
            "weight_scale": 115 + draw.below(12, heads, latent, nope // 32, dtype=torch.uint8),
        }
    return {
        "weight": (draw.normal(heads, latent, nope) * 20).to(dtype),
        "weight_scale": scale_of(draw, 1),
    }


def multiplied(
    draw: Draw, scheme: str, tokens: int = 7, batch: tuple[int, ...] = (), nope: int = 64
) -> dict[str, Any]:
    operands = bmm_operands(draw, scheme, 3, 40, nope)
    shape = (*batch, tokens, 3)
    if scheme == "mxfp4":
        operands |= {
            "x": draw.below(256, *shape, nope // 2, dtype=torch.uint8),
            "x_scale": 120 + draw.below(12, *shape, nope // 32, dtype=torch.uint8),
        }
    else:
        operands |= {
            "x": (draw.normal(*shape, nope) * 20).to(E4M3),
            "x_scale": scale_of(draw, *shape, -(-nope // 128)),
        }
    return operands | {"out_dtype": draw.dtype}


def multiplied_and_written(
    draw: Draw,
    scheme: str = "fp8",
    heads: int = 6,
    nope: int = 64,
    latent: int = 48,
    dtype: torch.dtype = E4M3,
    attributes: dict[str, Any] | None = None,
    **rest: Any,
) -> dict[str, Any]:
    arguments = latent_rope_written(draw, heads=heads, nope=nope, latent=latent, **rest)
    arguments |= bmm_operands(draw, scheme, heads, latent, nope, dtype) | {
        "scheme": scheme,
        **(attributes or {}),
    }
    return arguments | ({"dtype": dtype} if scheme == "fp8" else {})


def half_multiplied(
    draw: Draw,
    scheme: str = "fp8",
    *batch: int,
    tokens: int = 7,
    heads: int = 3,
    nope: int = 64,
    latent: int = 40,
    dtype: torch.dtype = E4M3,
    **attributes: Any,
) -> dict[str, Any]:
    operands = bmm_operands(draw, scheme, heads, latent, nope, dtype)
    operands |= {"x": draw.normal(*batch, tokens, heads, nope), "scheme": scheme, **attributes}
    return operands | ({"dtype": dtype} if scheme == "fp8" else {})


QUANTIZED_LINEAR_BY_HEAD: Cases = {
    f"{scheme}, {name}": partial(half_multiplied, scheme=scheme, **how)
    for scheme in ("fp8", "mxfp4")
    for name, how in {
        "several tokens": dict[str, Any](),
        "one token": dict(tokens=1),
        "no tokens": dict(tokens=0),
        "two groups": dict(nope=192, tokens=33),
    }.items()
} | {
    "fp8, batch": lambda draw: half_multiplied(draw, "fp8", 2),
    "mxfp4, batch": lambda draw: half_multiplied(draw, "mxfp4", 2),
    "mxfp4, rounded up": partial(half_multiplied, scheme="mxfp4", rounding="up"),
    "groups of 32": partial(half_multiplied, group=32),
    "e4m3fnuz": partial(half_multiplied, dtype=E4M3FNUZ),
}

LINEAR_BY_HEAD: Cases = {
    "several tokens": lambda draw: {"x": draw.normal(7, 3, 64), "weight": draw.normal(3, 40, 64)},
    "no tokens": lambda draw: {"x": draw.normal(0, 3, 64), "weight": draw.normal(3, 40, 64)},
    "batch": lambda draw: {"x": draw.normal(2, 7, 3, 64), "weight": draw.normal(3, 40, 64)},
    "part of a weight": lambda draw: {
        "x": draw.normal(7, 3, 24),
        "weight": draw.normal(3, 64, 40)[:, :24].transpose(1, 2),
    },
}

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
        "several tokens": dict[str, Any](),
        "one token": dict(tokens=1),
        "no tokens": dict(tokens=0),
        "several tiles": dict(tokens=33, latent=100, heads=2, skip=(3,)),
        "two groups": dict(nope=192),
        "batch of one": dict(batch=True),
        "fp8 cache": dict(cache=E4M3),
    }.items()
} | {
    "mxfp4, rounded up": partial(
        multiplied_and_written, scheme="mxfp4", attributes={"rounding": "up"}
    ),
    "e4m3fnuz": partial(multiplied_and_written, dtype=E4M3FNUZ, cache=E4M3FNUZ),
    "groups of 32": partial(multiplied_and_written, attributes={"group": 32}),
    "neox": partial(multiplied_and_written, rope_style="neox"),
}


def split_and_joined(
    draw: Draw,
    scheme: str,
    tokens: int = 7,
    heads: int = 3,
    nope: int = 24,
    values: int = 40,
    latent: int = 160,
    heads_first: bool = False,
    per: str = "row",
    **rest: Any,
) -> dict[str, Any]:
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
        "several tokens": dict[str, Any](),
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


def latent_attended(
    draw: Draw,
    tokens: int = 7,
    heads: int = 3,
    nope: int = 24,
    values: int = 24,
    latent: int = 48,
    rotated: int = 16,
    batch: tuple[int, ...] = (),
    stock: bool = False,
) -> dict[str, Any]:
    """stock: heads before tokens in memory, as in the classes of transformers."""
    lead = (*batch, tokens)
    if stock:
        q = draw.normal(*batch, heads, tokens, nope + rotated).transpose(-2, -3)
    else:
        q = draw.normal(*lead, heads, nope + rotated)
    q_nope, q_rope = q.split([nope, rotated], -1)
    kv_c, k_rope = side_by_side(draw, *lead, widths=[latent, rotated])
    return {
        "q_nope": q_nope,
        "q_rope": q_rope,
        "latent": kv_c,
        "k_rope": k_rope.unsqueeze(-2),
        "weight": draw.normal(heads * (nope + values), latent) / latent**0.5,
        "scale": (nope + rotated) ** -0.5,
    }


MLA_ATTENTION: Cases = {
    "several tokens": latent_attended,
    "one token": partial(latent_attended, tokens=1),
    "no tokens": partial(latent_attended, tokens=0),
    "several tiles": partial(latent_attended, tokens=150, heads=2),
    "narrow values": partial(latent_attended, values=8),
    "wide values": partial(latent_attended, values=40),
    "batch": partial(latent_attended, batch=(2,)),
    "from a stock layer": partial(latent_attended, batch=(2,), stock=True),
    "of chosen keys": lambda draw: (
        latent_attended(draw) | {"chosen": chosen_rows(draw, [(7, 7)], 3)}
    ),
}


def latent_paged(
    draw: Draw,
    sequences: list[tuple[int, int]],
    heads: int = 3,
    latent: int = 32,
    rotated: int = 16,
    **rest: Any,
) -> dict[str, Any]:
    arguments = paged(draw, sequences, (heads, 1), latent + rotated, **rest)
    del arguments["v_cache"]
    cache = arguments.pop("k_cache").squeeze(2)
    scaled = cache.dtype != draw.dtype and cache.dtype.itemsize == 1
    scale = {"kv_scale": cache_scales(draw)["k_scale"]} if scaled else {}
    return arguments | {"kv_cache": cache, "latent": latent} | scale


def latent_of_chosen(
    draw: Draw, sequences: list[tuple[int, int]], topk: int, padding: int = 0, **rest: Any
) -> dict[str, Any]:
    arguments = latent_paged(draw, sequences, padding=padding, **rest)
    return arguments | {"chosen": chosen_rows(draw, sequences, topk, padding)}


MLA_ABSORBED_ATTENTION: Cases = {
    "decode": lambda draw: latent_paged(draw, DECODE),
    "one sequence": lambda draw: latent_paged(draw, [(1, 300)]),
    "prefill": lambda draw: latent_paged(draw, PREFILL),
    "chunks": lambda draw: latent_paged(draw, CHUNKS),
    "drafts": lambda draw: latent_paged(draw, [(4, 33), (4, 4), (4, 18)]),
    "mixed, some without new tokens": lambda draw: latent_paged(draw, MIXED),
    "padding rows": lambda draw: latent_paged(draw, MIXED, padding=3),
    "padding rows only": lambda draw: latent_paged(draw, [(0, 9)], padding=3),
    "no sequences' tokens": lambda draw: latent_paged(draw, [(0, 9), (0, 0)]),
    "16 heads, decode": lambda draw: latent_paged(draw, DECODE, heads=16),
    "more heads than a tile": lambda draw: latent_paged(draw, [(1, 40), (3, 21)], heads=72),
    "several tiles": lambda draw: latent_paged(draw, [(70, 300), (1, 290)], heads=5),
    "odd widths": lambda draw: latent_paged(draw, MIXED, latent=40, rotated=12),
    "DeepSeek-V3": lambda draw: latent_paged(draw, [(1, 20), (2, 7)], 20, 512, 64),
    "DeepSeek-V3, decode": lambda draw: latent_paged(draw, [(1, 40), (1, 7)], 16, 512, 64),
    "fp8": lambda draw: latent_paged(draw, MIXED, cache=E4M3),
    "fp8, decode": lambda draw: latent_paged(draw, DECODE, cache=E4M3),
    "e4m3fnuz": lambda draw: latent_paged(draw, CHUNKS, cache=E4M3FNUZ),
    "batch of one": lambda draw: latent_paged(draw, CHUNKS) | {"q": draw.normal(1, 26, 3, 48)},
    "chosen, decode": lambda draw: latent_of_chosen(draw, DECODE, 6),
    "chosen, no more keys": lambda draw: latent_of_chosen(draw, DECODE, 48),
    "chosen, one key": lambda draw: latent_of_chosen(draw, DECODE, 1),
    "chosen, one sequence": lambda draw: latent_of_chosen(draw, [(1, 300)], 130),
    "chosen, mixed": lambda draw: latent_of_chosen(draw, MIXED, 7, padding=3),
    "chosen, prefill": lambda draw: latent_of_chosen(draw, PREFILL, 17),
    "chosen, padding rows only": lambda draw: latent_of_chosen(draw, [(0, 9)], 5, padding=3),
    "chosen, more heads than a tile": lambda draw: latent_of_chosen(
        draw, [(1, 40), (3, 21)], 19, heads=72
    ),
    "chosen, odd widths": lambda draw: latent_of_chosen(draw, MIXED, 9, latent=40, rotated=12),
    "chosen, DeepSeek-V3.2": lambda draw: latent_of_chosen(
        draw, [(1, 90), (2, 7)], 70, heads=20, latent=512, rotated=64
    ),
    "chosen, fp8": lambda draw: latent_of_chosen(draw, MIXED, 7, cache=E4M3),
    "chosen, e4m3fnuz": lambda draw: latent_of_chosen(draw, CHUNKS, 7, cache=E4M3FNUZ),
    "chosen, batch of one": lambda draw: {
        name: value[None] if name in ("q", "chosen") else value
        for name, value in latent_of_chosen(draw, CHUNKS, 7).items()
    },
}


def latent_projected(
    draw: Draw, sequences: list[tuple[int, int]], nope: int = 24, values: int = 20, **rest: Any
) -> dict[str, Any]:
    arguments = latent_paged(draw, sequences, **rest)
    tokens, heads, width = arguments["q"].shape
    latent = arguments.pop("latent")
    return arguments | {
        "q": draw.normal(tokens, heads, nope + width - latent),
        "weight": draw.normal(heads * (nope + values), latent) / latent**0.5,
        "scale": (nope + width - latent) ** -0.5,
    }


MLA_PAGED_ATTENTION: Cases = {
    "decode": lambda draw: latent_projected(draw, DECODE),
    "prefill": lambda draw: latent_projected(draw, PREFILL),
    "chunks": lambda draw: latent_projected(draw, CHUNKS),
    "mixed, some without new tokens": lambda draw: latent_projected(draw, MIXED),
    "padding rows": lambda draw: latent_projected(draw, MIXED, padding=3),
    "padding rows only": lambda draw: latent_projected(draw, [(0, 9)], padding=3),
    "a prompt, a chunk and a decode": lambda draw: latent_projected(
        draw, [(200, 200), (90, 300), (1, 290)], latent=16, nope=8, values=8
    ),
    "fp8": lambda draw: latent_projected(draw, MIXED, cache=E4M3),
    "chosen": lambda draw: (
        latent_projected(draw, MIXED, padding=3) | {"chosen": chosen_rows(draw, MIXED, 7, 3)}
    ),
    "chosen, no more keys": lambda draw: (
        latent_projected(draw, MIXED) | {"chosen": chosen_rows(draw, MIXED, 48)}
    ),
    "chosen, fp8": lambda draw: (
        latent_projected(draw, CHUNKS, cache=E4M3) | {"chosen": chosen_rows(draw, CHUNKS, 9)}
    ),
}


def latent_multiplied(
    draw: Draw,
    sequences: list[tuple[int, int]],
    scheme: str = "fp8_block",
    nope: int = 24,
    values: int = 40,
    latent: int = 128,
    dtype: torch.dtype = E4M3,
    **rest: Any,
) -> dict[str, Any]:
    """Of a weight that is quantized."""
    arguments = latent_projected(draw, sequences, nope, values, latent=latent, **rest)
    out = arguments["weight"].shape[0]
    how = {"activation": "mxfp4"} if scheme == "mxfp4" else {"dtype": dtype}
    operands = (mxfp4_operands if scheme == "mxfp4" else scaled_blocks)(
        draw, 1, latent, out=out, **how
    )
    parameters = {name: operands[name] for name in ("weight", "weight_scale")}
    return arguments | parameters | {"scheme": scheme, **({} if scheme == "mxfp4" else how)}


QUANTIZED_MLA_PAGED_ATTENTION: Cases = {
    f"{scheme}, {name}": partial(latent_multiplied, scheme=scheme, **how)
    for scheme in ("fp8_block", "mxfp4")
    for name, how in {
        "prefill": dict[str, Any](sequences=PREFILL),
        "chunks": dict(sequences=CHUNKS),
        "mixed": dict(sequences=MIXED, padding=3),
        "padding rows only": dict(sequences=[(0, 9)], padding=3),
        "fp8 cache": dict(sequences=CHUNKS, cache=E4M3),
    }.items()
}


# kv_b_proj of 3 heads, 32 columns of each for keys and 20 for values.
HEADS, NOPE, ROWS = 3, 32, 156
STORED: dict[str, Callable[..., dict[str, Any]]] = {
    "fp8": partial(scaled_fp8, per="tensor"),
    "fp8 per output": scaled_fp8,
    "fp8_block": scaled_blocks,
    "int8": int8_operands,
    "int4": int4_operands,
    "int4 with zeros": partial(int4_operands, zeros=True),
    "mxfp4": mxfp4_operands,
}


def stored(draw: Draw, name: str) -> dict[str, Any]:
    """kv_b_proj as a scheme stores it, for a latent of 192."""
    made = STORED[name](draw, 1, 192, out=ROWS)
    parameters = {key: made[key] for key in ("weight", "weight_scale")}
    if name == "int4 with zeros":
        parameters["zeros"] = made["zeros"]
    return parameters | {
        "scheme": name.split()[0],
        "group": 128 if name == "fp8_block" else 32,
    }


def kv_b_weight(draw: Draw, name: str) -> dict[str, Any]:
    made = stored(draw, name)
    return made if name.startswith("int4") else made | {"dtype": draw.dtype}


def kv_b_half(
    draw: Draw, name: str, product: str, part: str = "keys", codes: torch.dtype = E4M3
) -> dict[str, Any]:
    shape = {"heads": HEADS, "nope": NOPE, "part": part, "product": product, "codes": codes}
    return stored(draw, name) | shape


KV_B_WEIGHT: Cases = {name: partial(kv_b_weight, name=name) for name in STORED}
KV_B_HALF: Cases = {
    f"{part}, {name} as {product}": partial(kv_b_half, name=name, product=product, part=part)
    for part in ("keys", "values")
    for name, product in (
        ("fp8", "fp8"),
        ("fp8_block", "fp8"),
        ("fp8_block", "mxfp4"),
        ("mxfp4", "mxfp4"),
        ("mxfp4", "fp8"),
    )
} | {"fp8 as fnuz": partial(kv_b_half, name="fp8", product="fp8", codes=E4M3FNUZ)}
