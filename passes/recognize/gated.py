"""Gated activations become one op.

gate > silu (or gelu) > * up    =>    silu_and_mul(gate, up)
"""

from typing import Any

from torch import Tensor

from atomc import ops
from atomc.rewriting.rewrite import Rewrite, tensor_example


def _example() -> dict[str, Any]:
    return {"gate": tensor_example(3, 10), "up": tensor_example(3, 10)}


def _gelu_pattern(gate: Tensor, up: Tensor, approximate: str) -> Tensor:
    return ops.gelu_and_mul.reference(gate, up, approximate)


def _gelu_replacement(gate: Tensor, up: Tensor, approximate: str) -> Tensor:
    return ops.gelu_and_mul(gate, up, approximate)


def _gelu_example() -> dict[str, Any]:
    return {**_example(), "approximate": "none"}


SILU_AND_MUL = Rewrite(
    "silu_and_mul",
    ops.silu_and_mul.reference,
    lambda gate, up: ops.silu_and_mul(gate, up),
    _example,
)
GELU_AND_MUL = Rewrite("gelu_and_mul", _gelu_pattern, _gelu_replacement, _gelu_example)
