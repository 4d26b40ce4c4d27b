"""Replace gated activations by one op.

gate > silu (or gelu) > * up        =>    silu_and_mul(gate, up)
gate > sigmoid > * up (> + added)   =>    sigmoid_and_mul(gate, up, added)
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from atomc import ops
from atomc.rewriting.example import Example, tensor_example
from atomc.rewriting.rewrite import Case, Rewrite, unsupported


def _example() -> Example:
    return {"gate": tensor_example(3, 10), "up": tensor_example(3, 10)}


def _gelu_example() -> Example:
    return {**_example(), "approximate": "none"}


SILU_AND_MUL = Rewrite(
    "silu_and_mul",
    ops.silu_and_mul.reference,
    ops.silu_and_mul,
    _example,
)
GELU_AND_MUL = Rewrite("gelu_and_mul", ops.gelu_and_mul.reference, ops.gelu_and_mul, _gelu_example)


def _sigmoid_example(gates: int, added: bool) -> Example:
    return {
        "gate": tensor_example(3, gates),
        "up": tensor_example(3, 10),
        "added": tensor_example(3, 10) if added else None,
    }


SIGMOID_AND_MUL = Rewrite(
    "sigmoid_and_mul",
    ops.sigmoid_and_mul.reference,
    ops.sigmoid_and_mul,
    _sigmoid_example,
    needs={"aten::sigmoid": {}},
    apart=("gate", "up"),
    cases=[
        Case("a sum", {"gates": 10, "added": True}),
        Case("one gate a row, and a sum", {"gates": 1, "added": True}),
        Case("", {"gates": 10, "added": False}),
        Case("one gate a row", {"gates": 1, "added": False}),
    ],
)


def _reglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.relu(gate) * up


def _squared_reglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.relu(gate).square() * up


def _quick_geglu(gate: Tensor, up: Tensor, alpha: float) -> Tensor:
    return gate * torch.sigmoid(gate * alpha) * up


def _clamped(gate: Tensor, up: Tensor, alpha: float, low: float, high: float) -> Tensor:
    gate, up = gate.clamp(max=high), up.clamp(min=low, max=high)
    return (up + 1) * (gate * torch.sigmoid(gate * alpha))


def _scaled_example() -> Example:
    return {**_example(), "alpha": 1.3}


OTHER_GATES = [
    unsupported(
        "silu_and_mul", variant, pattern, example, needs, f"{resembles}, for which no op exists"
    )
    for variant, pattern, example, needs, resembles in (
        ("relu", _reglu, _example, ["aten::relu"], "relu"),
        ("relu squared", _squared_reglu, _example, ["aten::relu"], "a squared relu"),
        ("glu", F.glu, lambda: {"input": tensor_example(3, 10)}, ["aten::glu"], "glu"),
        (
            "clamped",
            _clamped,
            lambda: {**_scaled_example(), "low": -3.5, "high": 6.5},
            ["aten::sigmoid", "aten::clamp"],
            "clamped operands and up + 1",
        ),
        (
            "quick_gelu",
            _quick_geglu,
            _scaled_example,
            ["aten::sigmoid"],
            "gate * sigmoid(alpha * gate)",
        ),
    )
]
