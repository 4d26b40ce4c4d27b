"""Gated activations become one op.

    gate > silu (or gelu) > * up    =>    silu_and_mul(gate, up)
"""

from typing import Any

from torch import Tensor

from atomc import ops
from atomc.rewrite import Rewrite, tensor_example


def _example() -> dict[str, Any]:
    return {"gate": tensor_example(3, 10), "up": tensor_example(3, 10)}


def _gelu(approximate: str) -> Rewrite:
    def pattern(gate: Tensor, up: Tensor) -> Tensor:
        return ops.gelu_and_mul.reference(gate, up, approximate)  # type: ignore[no-any-return]

    def replacement(gate: Tensor, up: Tensor) -> Tensor:
        return ops.gelu_and_mul(gate, up, approximate)  # type: ignore[no-any-return]

    return Rewrite("gelu_and_mul", pattern, replacement, _example, variant=approximate,
                   attrs={"approximate": approximate})  # fmt: skip


SILU_AND_MUL = [Rewrite("silu_and_mul", ops.silu_and_mul.reference, lambda gate, up: ops.silu_and_mul(gate, up), _example)]
GELU_AND_MUL = [_gelu("none"), _gelu("tanh")]
