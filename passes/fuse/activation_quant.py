"""Quantize the result of a gated activation in the same op.

   gate, up > silu_and_mul > quantizer -> codes, scales
=>
   gate, up > silu_and_mul_quant -> codes, scales
"""

from typing import Unpack

from torch import Tensor

from atomc import ops
from atomc.ops.schemes import Attributes
from atomc.passes.fuse.quantizers import QUANTIZERS, Quantizer
from atomc.rewriting.example import Example, tensor_example
from atomc.rewriting.rewrite import Case, Rewrite


def _pattern(
    gate: Tensor,
    up: Tensor,
    quantizer: Quantizer,
    scale: Tensor | None,
    **captured: Unpack[Attributes],
) -> tuple[Tensor, ...]:
    return quantizer(ops.silu_and_mul(gate, up), scale, **captured)


def _replacement(
    gate: Tensor,
    up: Tensor,
    quantizer: Quantizer,
    scale: Tensor | None,
    **captured: Unpack[Attributes],
) -> Tensor | tuple[Tensor, ...]:
    results = ops.silu_and_mul_quant(
        gate, up, scale, scheme=quantizer.scheme, **quantizer.attributes(captured)
    )
    return quantizer.results(results, [])


def _example(quantizer: Quantizer) -> Example:
    return {
        "gate": tensor_example(3, 64),
        "up": tensor_example(3, 64),
        "quantizer": quantizer,
        **quantizer.example(),
    }


SILU_AND_MUL_QUANT = Rewrite(
    "silu_and_mul_quant",
    _pattern,
    _replacement,
    _example,
    attrs=lambda quantizer, **_: {"scheme": quantizer.scheme},
    cases=[Case(q.scheme, {"quantizer": q}, q.needs) for q in QUANTIZERS],
)
