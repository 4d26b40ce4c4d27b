"""The indexer of sparse attention. J heads, C width of its keys.

All numbers are small integers: scores are exact in any order of the sum, and many are equal.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from kernel_cases.attention import CHUNKS, DECODE, MIXED, PREFILL
from kernel_cases.draw import E4M3, E4M3FNUZ, Cases, Draw, slots_of


def integers(draw: Draw, largest: int, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    return (draw.below(2 * largest + 1, *shape) - largest).to(dtype or draw.dtype)


def ranked(
    draw: Draw, tokens: int = 9, heads: int = 3, width: int = 20, topk: int = 4, *batch: int
) -> dict[str, Any]:
    return {
        "q": integers(draw, 2, *batch, tokens, heads, width),
        "k": integers(draw, 2, *batch, tokens, width),
        "weights": integers(draw, 3, *batch, tokens, heads),
        "topk": topk,
    }


INDEX_TOPK: Cases = {
    "several tokens": ranked,
    "one token": partial(ranked, tokens=1),
    "no tokens": partial(ranked, tokens=0),
    "fewer keys than chosen": partial(ranked, topk=30),
    "batch": lambda draw: ranked(draw, 9, 3, 20, 4, 2),
}


def cached(draw: Draw, lengths: list[int], width: int, cache: torch.dtype | None) -> Any:
    """A cache with a key for each token, and the blocks of each sequence. In fp8 the scales are
    powers of two.
    """
    coded = cache is not None
    keys, _, blocks = draw.caches(lengths, 1, width + 4 * coded, cache)
    keys = keys.squeeze(2)
    for own, length in zip(blocks, lengths, strict=True):
        slots = draw.ints(slots_of(own, range(length), keys.shape[1]))
        rows = integers(draw, 2, length, width).to(keys.dtype)
        if coded:
            scale = 2.0 ** (draw.below(3, length, 1) - 1).to(torch.float32)
            rows = torch.cat([part.view(torch.uint8) for part in (rows, scale)], -1)
            keys.view(torch.uint8)[slots // keys.shape[1], slots % keys.shape[1]] = rows
        else:
            keys[slots // keys.shape[1], slots % keys.shape[1]] = rows
    return keys, blocks


def ranked_in_cache(
    draw: Draw,
    sequences: list[tuple[int, int]],
    heads: int = 3,
    width: int = 20,
    topk: int = 7,
    padding: int = 0,
    cache: torch.dtype | None = None,
) -> dict[str, Any]:
    lengths = [length for _, length in sequences]
    keys, blocks = cached(draw, lengths, width, cache)
    starts = torch.tensor([0] + [new for new, _ in sequences]).cumsum(0)
    tokens = int(starts[-1]) + padding
    return {
        "q": integers(draw, 2, tokens, heads, width),
        "weights": integers(draw, 3, tokens, heads),
        "index_cache": keys,
        "query_start": starts.to(torch.int32).to(draw.device),
        "seq_lens": draw.ints(lengths, torch.int32),
        "block_tables": torch.tensor(blocks, dtype=torch.int32, device=draw.device),
        "token": draw.normal(0),
        "topk": topk,
    }


def ranked_codes(
    draw: Draw, sequences: list[tuple[int, int]], dtype: torch.dtype = E4M3, **rest: Any
) -> dict[str, Any]:
    """With queries in codes, over keys in codes."""
    given = ranked_in_cache(draw, sequences, cache=dtype, **rest)
    return given | {"q": given["q"].to(dtype), "weights": given["weights"].float() / 4}


PAGED_INDEX_TOPK: Cases = {
    "decode": lambda draw: ranked_in_cache(draw, DECODE),
    "decode, no more keys than chosen": lambda draw: ranked_in_cache(draw, DECODE, topk=48),
    "one sequence": lambda draw: ranked_in_cache(draw, [(1, 300)], topk=100),
    "one key": lambda draw: ranked_in_cache(draw, DECODE, topk=1),
    "prefill": lambda draw: ranked_in_cache(draw, PREFILL),
    "chunks": lambda draw: ranked_in_cache(draw, CHUNKS, topk=13),
    "drafts": lambda draw: ranked_in_cache(draw, [(4, 33), (4, 4), (4, 18)]),
    "mixed, some without new tokens": lambda draw: ranked_in_cache(draw, MIXED),
    "padding rows": lambda draw: ranked_in_cache(draw, MIXED, padding=3),
    "padding rows only": lambda draw: ranked_in_cache(draw, [(0, 9)], padding=3),
    "more heads than a tile": lambda draw: ranked_in_cache(draw, [(1, 40), (3, 41)], heads=72),
    "DeepSeek-V3.2": lambda draw: ranked_in_cache(draw, [(1, 150), (2, 90)], 64, 128, 64),
    "many keys": lambda draw: ranked_in_cache(draw, [(1, 4200), (1, 2100)], 2, 16, 2048),
    "fp8": lambda draw: ranked_in_cache(draw, MIXED, cache=E4M3),
    "fp8, decode": lambda draw: ranked_in_cache(draw, DECODE, cache=E4M3),
    "e4m3fnuz": lambda draw: ranked_in_cache(draw, CHUNKS, cache=E4M3FNUZ),
    "queries in fp8": lambda draw: ranked_codes(draw, MIXED, padding=1),
    "batch of one": lambda draw: {
        name: value[None] if name in ("q", "weights") else value
        for name, value in ranked_in_cache(draw, CHUNKS).items()
    },
}


def index_written(
    draw: Draw,
    tokens: int = 7,
    width: int = 20,
    skip: tuple[int, ...] = (),
    cache: torch.dtype | None = None,
    batch: bool = False,
) -> dict[str, Any]:
    """Keys of new tokens, cut from a wider tensor, and the cache that they go to."""
    keys, _, [blocks] = draw.caches([12 + tokens], 1, width + 4 * (cache is not None), cache)
    slots = slots_of(blocks, range(12, 12 + tokens), keys.shape[1])
    wide = draw.normal(*([1] if batch else []), tokens, width + 5)
    return {
        "k": wide[..., :width] if tokens else wide[..., :width].clone(),
        "index_cache": keys.squeeze(2),
        "slots": draw.ints([-1 if t in skip else slot for t, slot in enumerate(slots)]),
    }


INDEX_WRITE: Cases = {
    "several tokens": index_written,
    "one token": partial(index_written, tokens=1),
    "no tokens": partial(index_written, tokens=0),
    "some are not written": partial(index_written, skip=(0, 4)),
    "many tokens": partial(index_written, tokens=300, width=128),
    "fp8": partial(index_written, cache=E4M3, skip=(2,)),
    "fp8, none is written": partial(index_written, tokens=2, cache=E4M3, skip=(0, 1)),
    "fp8, DeepSeek-V3.2": partial(index_written, cache=E4M3, width=128),
    "e4m3fnuz": partial(index_written, cache=E4M3FNUZ),
    "batch of one": partial(index_written, batch=True),
}


def some_chosen(draw: Draw, tokens: int = 9, topk: int = 4, *batch: int) -> dict[str, Any]:
    """Positions in ascending order, then -1."""
    end = draw.below(tokens + 1, *batch, tokens, topk).sort(-1).values
    return {"chosen": end.masked_fill(end == tokens, -1).to(torch.int32)}


CHOSEN_MASK: Cases = {
    "several tokens": some_chosen,
    "one token": partial(some_chosen, tokens=1),
    "no tokens": partial(some_chosen, tokens=0),
    "batch": lambda draw: some_chosen(draw, 9, 4, 2),
}


def chosen_rows(
    draw: Draw, sequences: list[tuple[int, int]], topk: int, padding: int = 0
) -> Tensor:
    """For each row of ragged sequences, all positions up to its own if they are at most `topk`,
    else so many of them at random: [T, topk] i32.
    """
    rows = []
    for new, length in sequences:
        for position in range(length - new, length):
            order = torch.randperm(position + 1, generator=draw.generator)[:topk].sort().values
            rows.append(torch.cat([order, order.new_full((topk - len(order),), -1)]))
    rows += [torch.full((topk,), -1)] * padding
    made = torch.stack(rows) if rows else torch.empty((0, topk))
    return made.to(torch.int32).to(draw.device)
