"""Causal convolutions. C channels, K kernel size."""

from functools import partial
from typing import Any

import torch

from kernel_cases.attention import CHUNKS, DECODE, MIXED, PREFILL
from kernel_cases.draw import Cases, Draw

BEGINNING = [(1, 1), (1, 9), (1, 1)]
# Fewer and more new tokens than the inputs that are kept.
SHORT = [(2, 2), (2, 7), (3, 3), (1, 4), (5, 6)]


def convolved(
    draw: Draw,
    tokens: int = 9,
    channels: int = 20,
    taps: int = 4,
    bias: bool = False,
    activation: str = "silu",
    batch: tuple[int, ...] = (),
) -> dict[str, Any]:
    return {
        "x": draw.normal(*batch, tokens, channels),
        "weight": draw.normal(channels, taps),
        "bias": draw.normal(channels) if bias else None,
        "activation": activation,
    }


def of_sequences(draw: Draw, sequences: list[tuple[int, int]]) -> dict[str, Any]:
    """What a step says of sequences of (new tokens, length); each has a slot of its own, in no
    order.
    """
    starts = torch.tensor([0] + [new for new, _ in sequences]).cumsum(0)
    slots = torch.randperm(len(sequences) + 2, generator=draw.generator)[: len(sequences)]
    return {
        "query_start": starts.to(torch.int32).to(draw.device),
        "seq_lens": draw.ints([length for _, length in sequences], torch.int32),
        "state_slots": slots.to(draw.device),
    }


def convolved_in_steps(
    draw: Draw,
    sequences: list[tuple[int, int]],
    channels: int = 20,
    taps: int = 4,
    padding: int = 0,
    packed: int = 0,
    **attributes: Any,
) -> dict[str, Any]:
    """packed: columns of the projection that x is cut from."""
    tokens = sum(new for new, _ in sequences) + padding
    given = convolved(draw, tokens, channels, taps, **attributes)
    if packed:
        given["x"] = draw.normal(tokens, packed)[:, 3 : 3 + channels]
    state = draw.normal(len(sequences) + 2, taps - 1, channels)
    return given | {"conv_state": state} | of_sequences(draw, sequences)


CAUSAL_CONV1D: Cases = {
    "several tokens": convolved,
    "one token": partial(convolved, tokens=1),
    "no tokens": partial(convolved, tokens=0),
    "bias": partial(convolved, bias=True),
    "no activation": partial(convolved, activation="none", taps=3),
    "two taps": partial(convolved, taps=2),
    "batch": partial(convolved, batch=(2,)),
    "packed": lambda draw: convolved(draw) | {"x": draw.normal(9, 33)[:, 3:23]},
    "several tiles": partial(convolved, tokens=150, channels=300),
}

CAUSAL_CONV1D_UPDATE: Cases = {
    "decode": lambda draw: convolved_in_steps(draw, DECODE),
    "beginning": lambda draw: convolved_in_steps(draw, BEGINNING, bias=True),
    "prefill": lambda draw: convolved_in_steps(draw, PREFILL),
    "chunks": lambda draw: convolved_in_steps(draw, CHUNKS, bias=True),
    "short": lambda draw: convolved_in_steps(draw, SHORT),
    "two taps": lambda draw: convolved_in_steps(draw, SHORT, taps=2),
    "no activation": lambda draw: convolved_in_steps(draw, SHORT, taps=3, activation="none"),
    "mixed, some without new tokens": lambda draw: convolved_in_steps(draw, MIXED),
    "padding rows": lambda draw: convolved_in_steps(draw, MIXED, padding=3),
    "padding rows only": lambda draw: convolved_in_steps(draw, [(0, 9)], padding=3),
    "packed": lambda draw: convolved_in_steps(draw, CHUNKS, channels=300, packed=337),
    "packed, decode": lambda draw: convolved_in_steps(draw, DECODE, channels=300, packed=337),
    "batch of one": lambda draw: {
        name: value[None] if name == "x" else value
        for name, value in convolved_in_steps(draw, CHUNKS).items()
    },
}
