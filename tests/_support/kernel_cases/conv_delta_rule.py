"""Convolution, gates and the gated delta rule in one op. H key heads, N value heads."""

from functools import partial
from typing import Any

import torch

from kernel_cases.conv import BEGINNING, of_sequences
from kernel_cases.draw import Cases, Draw


def gates(
    draw: Draw, tokens: int = 9, heads: int = 4, of_parameters: torch.dtype | None = None
) -> dict[str, Any]:
    return {
        "a": draw.normal(tokens, heads) * 3,
        "b": draw.normal(tokens, heads),
        "A_log": draw.normal(heads, dtype=of_parameters),
        "dt_bias": draw.normal(heads, dtype=of_parameters),
    }


def cut_gates(draw: Draw, tokens: int, heads: int) -> dict[str, Any]:
    """a and b cut from one projection."""
    b, a = draw.normal(tokens, 3 * heads + 1)[:, 1:].split([heads, 2 * heads], -1)
    return gates(draw, tokens, heads) | {"a": a[:, heads:], "b": b}


def in_steps(
    draw: Draw,
    sequences: list[tuple[int, int]],
    heads: tuple[int, int] = (1, 2),
    width: tuple[int, int] = (16, 32),
    taps: int = 4,
    bias: bool = False,
    padding: int = 0,
    **attributes: Any,
) -> dict[str, Any]:
    tokens = sum(new for new, _ in sequences) + padding
    channels = 2 * heads[0] * width[0] + heads[1] * width[1]
    slots = len(sequences) + 2
    return {
        "x": draw.normal(tokens, channels),
        "weight": draw.normal(channels, taps),
        "bias": draw.normal(channels) if bias else None,
        "conv_state": draw.normal(slots, taps - 1, channels),
        **gates(draw, tokens, heads[1]),
        "recurrent_state": draw.normal(slots, heads[1], *width, dtype=torch.float32),
        **of_sequences(draw, sequences),
        "activation": "silu",
        "scale": width[0] ** -0.5,
        **attributes,
    }


def packed(draw: Draw, sequences: list[tuple[int, int]]) -> dict[str, Any]:
    """x, a and b cut from one projection."""
    given = in_steps(draw, sequences)
    tokens, channels = given["x"].shape
    x = draw.normal(tokens, channels + 9)[:, 3 : 3 + channels]
    return given | {"x": x} | {n: cut_gates(draw, tokens, 2)[n] for n in ("a", "b")}


def batch_of_one(draw: Draw, sequences: list[tuple[int, int]]) -> dict[str, Any]:
    given = in_steps(draw, sequences)
    return given | {name: given[name][None] for name in ("x", "a", "b")}


DELTA_GATES: Cases = {
    "several tokens": gates,
    "one token": partial(gates, tokens=1, heads=3),
    "no tokens": partial(gates, tokens=0),
    "parameters in fp32": partial(gates, of_parameters=torch.float32),
    "packed": lambda draw: cut_gates(draw, 70, 5),
    "twice the rate": lambda draw: gates(draw) | {"rate_scale": 2.0},
    "far from zero": lambda draw: gates(draw) | {"a": draw.normal(9, 4) * 30},
    "batch": lambda draw: {
        name: x[None] if name in ("a", "b") else x for name, x in gates(draw).items()
    },
}

# Programs of Triton's interpreter are slow: few sequences and heads.
TWO = [(1, 5), (1, 1)]
CONV_GATED_DELTA_RULE_UPDATE: Cases = {
    "decode": lambda draw: in_steps(draw, TWO, (2, 4)),
    "beginning": lambda draw: in_steps(draw, BEGINNING, bias=True),
    "decode, padding": lambda draw: in_steps(draw, [*TWO, (0, 9)], padding=1),
    "three heads": lambda draw: in_steps(draw, [(1, 3)], heads=(1, 3)),
    "as many key heads": lambda draw: in_steps(draw, TWO, heads=(2, 2)),
    "packed, decode": lambda draw: packed(draw, TWO),
    "two taps": lambda draw: in_steps(draw, TWO, taps=2, bias=True),
    "three taps, no activation": lambda draw: in_steps(draw, TWO, taps=3, activation="none"),
    "twice the rate": lambda draw: in_steps(draw, TWO, rate_scale=2.0),
    "odd widths": lambda draw: in_steps(draw, TWO, width=(24, 40)),
    "Qwen3.5, decode": lambda draw: in_steps(draw, [(1, 5)], width=(128, 128)),
    "batch of one, decode": lambda draw: batch_of_one(draw, TWO),
    "mixed, some without new tokens": lambda draw: in_steps(draw, [(3, 9), (0, 4), (1, 1)]),
    "a prompt": lambda draw: in_steps(draw, [(10, 12)], bias=True),
    "padding rows only": lambda draw: in_steps(draw, [(0, 9)], padding=3),
    "packed": lambda draw: packed(draw, [(2, 2), (1, 4)]),
}
