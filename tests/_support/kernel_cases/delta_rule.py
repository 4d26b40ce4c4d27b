"""The gated delta rule. H key heads, N value heads, K key width, V value width."""

from functools import partial
from typing import Any

import torch

from kernel_cases.attention import CHUNKS, DECODE, MIXED
from kernel_cases.conv import BEGINNING, SHORT, of_sequences
from kernel_cases.draw import Cases, Draw

# Chunks are of 64 tokens: one of less, one of exactly as many, several, and a state before them.
AROUND_CHUNKS = [(70, 70), (64, 64), (1, 5), (129, 141)]


def ruled(
    draw: Draw,
    tokens: int = 9,
    heads: tuple[int, int] = (1, 2),
    width: tuple[int, int] = (16, 32),
    batch: tuple[int, ...] = (),
) -> dict[str, Any]:
    key_heads, value_heads = heads
    return {
        "q": draw.normal(*batch, tokens, key_heads, width[0]),
        "k": draw.normal(*batch, tokens, key_heads, width[0]),
        "v": draw.normal(*batch, tokens, value_heads, width[1]),
        "g": -draw.normal(*batch, tokens, value_heads, dtype=torch.float32).exp() / 4,
        "beta": draw.normal(*batch, tokens, value_heads).sigmoid(),
        "scale": width[0] ** -0.5,
    }


def ruled_in_steps(
    draw: Draw,
    sequences: list[tuple[int, int]],
    heads: tuple[int, int] = (1, 2),
    width: tuple[int, int] = (16, 32),
    padding: int = 0,
) -> dict[str, Any]:
    tokens = sum(new for new, _ in sequences) + padding
    shape = (len(sequences) + 2, heads[1], *width)
    state = draw.normal(*shape, dtype=torch.float32)
    given = ruled(draw, tokens, heads, width)
    return given | {"recurrent_state": state} | of_sequences(draw, sequences)


def packed(draw: Draw, sequences: list[tuple[int, int]]) -> dict[str, Any]:
    """q, k and v cut from one row of a convolution, g and beta from projections."""
    given = ruled_in_steps(draw, sequences)
    tokens = len(given["v"])
    q, k, v = draw.normal(tokens, 2 * 16 + 64).split([16, 16, 64], -1)
    return given | {
        "q": q.unflatten(-1, (1, 16)),
        "k": k.unflatten(-1, (1, 16)),
        "v": v.unflatten(-1, (2, 32)),
        "g": -draw.normal(tokens, 4, dtype=torch.float32)[:, 2:].exp() / 4,
        "beta": draw.normal(tokens, 4)[:, :2].sigmoid(),
    }


GATED_DELTA_RULE: Cases = {
    "several tokens": ruled,
    "one token": partial(ruled, tokens=1),
    "no tokens": partial(ruled, tokens=0),
    "several chunks": partial(ruled, tokens=130, heads=(2, 4)),
    "as many key heads": partial(ruled, tokens=65, heads=(2, 2)),
    "no decay": lambda draw: ruled(draw, 70) | {"g": torch.zeros(70, 2, device=draw.device)},
    "all forgotten": lambda draw: ruled(draw, 70) | {"g": draw.normal(70, 2).float().abs() * -60},
    "odd widths": partial(ruled, width=(24, 40)),
    "batch": partial(ruled, batch=(2,), tokens=70),
    "Qwen3.5": partial(ruled, tokens=66, width=(128, 128)),
}

GATED_DELTA_RULE_UPDATE: Cases = {
    "decode": lambda draw: ruled_in_steps(draw, DECODE, (2, 4)),
    "beginning": lambda draw: ruled_in_steps(draw, BEGINNING),
    "chunks": lambda draw: ruled_in_steps(draw, CHUNKS),
    "short": lambda draw: ruled_in_steps(draw, SHORT, heads=(2, 2)),
    "around chunks": lambda draw: ruled_in_steps(draw, AROUND_CHUNKS),
    "mixed, some without new tokens": lambda draw: ruled_in_steps(draw, MIXED),
    "padding rows": lambda draw: ruled_in_steps(draw, MIXED, padding=3),
    "padding rows only": lambda draw: ruled_in_steps(draw, [(0, 9)], padding=3),
    "packed": lambda draw: packed(draw, CHUNKS),
    "packed, decode": lambda draw: packed(draw, DECODE),
    "odd widths": lambda draw: ruled_in_steps(draw, SHORT, width=(24, 40)),
    "Qwen3.5": lambda draw: ruled_in_steps(draw, [(70, 75), (1, 1)], width=(128, 128)),
    "Qwen3.5, decode": lambda draw: ruled_in_steps(draw, [(1, 5)], (1, 2), (128, 128)),
    "batch of one": lambda draw: {
        name: value[None] if name in ("q", "k", "v", "g", "beta") else value
        for name, value in ruled_in_steps(draw, SHORT).items()
    },
}
