"""The scan of Mamba-2. N heads, P width of a head, G groups, S width of the state."""

from functools import partial
from typing import Any

import torch

from kernel_cases.attention import CHUNKS, DECODE, MIXED, PREFILL
from kernel_cases.draw import Cases, Draw

# Longer than a chunk of the kernels, with a rest, and with a chunk of one token.
LONG = [(130, 150), (1, 7), (65, 65)]


def scanned(
    draw: Draw,
    tokens: int = 9,
    heads: int = 4,
    width: int = 12,
    groups: int = 2,
    state: int = 10,
    *batch: int,
    dt_min: float = 0.0,
    dt_max: float | None = None,
) -> dict[str, Any]:
    """x, B and C as neighbours in the output of one convolution, dt beside it; heads forget slowly
    and fast.
    """
    lead = (*batch, tokens)
    rows = draw.normal(*lead, heads * width + 2 * groups * state + 3)
    x, b, c, _ = rows.split([heads * width, groups * state, groups * state, 3], -1)
    return {
        "x": x.unflatten(-1, (heads, width)),
        "dt": draw.normal(*lead, heads + 5)[..., :heads],
        "a_log": 2 * draw.normal(heads) - 2,
        "b": b.unflatten(-1, (groups, state)),
        "c": c.unflatten(-1, (groups, state)),
        "d": draw.normal(heads),
        "dt_bias": draw.normal(heads),
        "dt_min": dt_min,
        "dt_max": dt_max,
    }


SSM_SCAN: Cases = {
    "several tokens": scanned,
    "one token": partial(scanned, tokens=1),
    "no tokens": partial(scanned, tokens=0),
    "chunks and a rest": partial(scanned, tokens=150),
    "one group": partial(scanned, groups=1, heads=3),
    "limits": partial(scanned, dt_min=0.5, dt_max=1.5),
    "batch": lambda draw: scanned(draw, 70, 4, 12, 2, 10, 2),
}


def scanned_from_state(
    draw: Draw,
    sequences: list[tuple[int, int]],
    *sizes: int,
    padding: int = 0,
    **limits: Any,
) -> dict[str, Any]:
    """sequences: (new tokens, all tokens) of each. The slot of one that begins has the state of
    another, which must not be read.
    """
    starts = torch.tensor([0] + [new for new, _ in sequences]).cumsum(0)
    given = scanned(draw, int(starts[-1]) + padding, *sizes, **limits)
    (heads, width), state = given["x"].shape[-2:], given["b"].shape[-1]
    slots = torch.randperm(len(sequences) + 2, generator=draw.generator)[: len(sequences)]
    return given | {
        "recurrent_state": draw.normal(
            len(sequences) + 2, heads, width, state, dtype=torch.float32
        ),
        "query_start": starts.to(torch.int32).to(draw.device),
        "seq_lens": draw.ints([length for _, length in sequences], torch.int32),
        "state_slots": slots.to(draw.device),
    }


SSM_SCAN_UPDATE: Cases = {
    "decode": lambda draw: scanned_from_state(draw, DECODE),
    "decode with padding": lambda draw: scanned_from_state(draw, [*DECODE, (0, 0)], padding=1),
    "one sequence": lambda draw: scanned_from_state(draw, [(1, 300)]),
    "prefill": lambda draw: scanned_from_state(draw, PREFILL),
    "chunks": lambda draw: scanned_from_state(draw, CHUNKS),
    "long chunks": lambda draw: scanned_from_state(draw, LONG),
    "mixed, some without new tokens": lambda draw: scanned_from_state(draw, MIXED),
    "padding rows": lambda draw: scanned_from_state(draw, MIXED, padding=3),
    "padding rows only": lambda draw: scanned_from_state(draw, [(0, 9)], padding=3),
    "one group, odd widths": lambda draw: scanned_from_state(draw, MIXED, 3, 7, 1, 5),
    "limits": lambda draw: scanned_from_state(draw, MIXED, dt_min=0.5, dt_max=1.5),
    "Granite 4": lambda draw: scanned_from_state(draw, [(70, 90), (1, 5)], 4, 64, 1, 128),
    "Granite 4, decode": lambda draw: scanned_from_state(draw, [(1, 90), (1, 5)], 4, 64, 1, 128),
    "batch of one": lambda draw: {
        name: value[None] if name in ("x", "dt", "b", "c") else value
        for name, value in scanned_from_state(draw, CHUNKS).items()
    },
}
