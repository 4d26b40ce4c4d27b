"""LoRA adapters of linear layers."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from kernel_cases.draw import Cases, Draw


def lora(
    draw: Draw,
    rows: Sequence[int],
    widths: Sequence[int] = (33,),
    *,
    inputs: int = 80,
    rank: int = 4,
    adapters: int = 3,
    padding: int = 0,
) -> dict[str, Any]:
    outputs, thin = sum(widths) + padding, rank * len(widths)
    return {
        "y": draw.normal(len(rows), outputs),
        "x": draw.normal(len(rows), inputs),
        "a": draw.normal(adapters, thin, inputs) / inputs**0.5,
        "b": draw.normal(adapters, rank, outputs),
        "rows": draw.ints(list(rows)).int(),
        "widths": list(widths),
    }


def batched(draw: Draw) -> dict[str, Any]:
    """Rows in two dimensions, of x cut from wider rows, and of y that lie in another order."""
    found = lora(draw, [0, -1, 2, 2, 1, 0])
    x: Tensor = draw.packed(2, 3, 80)[1]
    return found | {"x": x, "y": draw.normal(2, 3, 33)}


LORA_LINEAR: Cases = {
    "several adapters": lambda draw: lora(draw, [1, -1, 0, 0, 2, -1, 1]),
    "no adapter": lambda draw: lora(draw, [-1] * 5),
    "one row": lambda draw: lora(draw, [2]),
    "merged": lambda draw: lora(draw, [1, 0, -1, 2], (40, 7, 17)),
    "merged, padding behind": lambda draw: lora(draw, [1, -1, 2], (30, 5), padding=5),
    "odd rank": lambda draw: lora(draw, [0, 1], (9, 9, 9), rank=5),
    "wide rank": lambda draw: lora(draw, [0, -1, 1], rank=64),
    "one adapter": lambda draw: lora(draw, [0, -1, 0], adapters=1),
    "long rows": lambda draw: lora(draw, [0, 2, -1], inputs=1100),
    "a batch": batched,
    "no rows": lambda draw: lora(draw, []),
    "twenty rows": lambda draw: lora(
        draw, [i % 3 - 1 for i in range(20)], (70, 5), inputs=1100, rank=5, padding=3
    ),
    "widest rank": lambda draw: lora(
        draw, [i // 30 - 1 for i in range(70)], (16, 16, 48, 16), inputs=512, rank=64
    ),
    "many rows": lambda draw: lora(draw, [i // 9 % 4 - 1 for i in range(70)], (70, 20)),
}
