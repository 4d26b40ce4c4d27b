"""Linear layers and embeddings."""

from functools import partial
from typing import Any

import torch

from kernel_cases.draw import Cases, Draw, Make


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


def without_bias(make: Make, draw: Draw) -> dict[str, Any]:
    return {name: given for name, given in make(draw).items() if name != "bias"}


LINEAR_FP32: Cases = {
    name: partial(without_bias, make) for name, make in LINEAR.items() if name != "bias"
}


def gated(
    draw: Draw, *shape: int, out: int = 66, activation: str = "silu", bias: bool = True
) -> dict[str, Any]:
    return {**linear(draw, *shape, out=out, bias=bias), "activation": activation}


LINEAR_GATED: Cases = {
    "one row": lambda draw: gated(draw, 1, 64, bias=False),
    "odd sizes": lambda draw: gated(draw, 7, 80, activation="gelu_tanh"),
    "batch": lambda draw: gated(draw, 2, 7, 64, activation="gelu"),
    "one vector": lambda draw: gated(draw, 64),
    "no rows": lambda draw: gated(draw, 0, 64),
    "packed": lambda draw: gated(draw, 1, 64) | {"x": draw.packed(7, 64)[1]},
    "two rows": lambda draw: gated(draw, 2, 64),
    "sixteen rows": lambda draw: gated(draw, 16, 80),
    "one tile's odd half": lambda draw: gated(draw, 1, 1096, out=34, activation="gelu"),
    "long": lambda draw: gated(draw, 3, 4104, out=34),
    "long, one row": lambda draw: gated(draw, 1, 4104, out=34, activation="gelu_tanh"),
    "wide, one row": lambda draw: gated(draw, 1, 64, out=4102),
    "wide, sixteen rows": lambda draw: gated(draw, 16, 64, out=4102),
}

EMBEDDING: Cases = {
    "one id": lambda draw: {"ids": draw.below(50, 1), "weight": draw.normal(50, 64)},
    "batch": lambda draw: {"ids": draw.below(50, 2, 7), "weight": draw.normal(50, 80)},
    "int32": lambda draw: {
        "ids": draw.below(50, 7, dtype=torch.int32),
        "weight": draw.normal(50, 64),
    },
    "no ids": lambda draw: {"ids": draw.below(50, 0), "weight": draw.normal(50, 64)},
    "every second id": lambda draw: {"ids": draw.below(50, 14)[::2], "weight": draw.normal(50, 64)},
}
