"""A gated activation quantizes its own result.

gate, up > silu_and_mul > quantizer -> codes, scales   =>   gate, up > silu_and_mul_quant -> codes,
                                                       scales
"""

from typing import Any

from torch import Tensor

from atomc import ops
from atomc.passes.fuse.quantizers import QUANTIZERS, Quantizer
from atomc.rewriting.rewrite import Case, Rewrite, tensor_example


def _pattern(
    gate: Tensor, up: Tensor, quantizer: Quantizer, scale: Tensor | None, **decided: Any
) -> Any:
    return quantizer(ops.silu_and_mul(gate, up), scale, **decided)


def _replacement(
    gate: Tensor, up: Tensor, quantizer: Quantizer, scale: Tensor | None, **decided: Any
) -> Any:
    made = ops.silu_and_mul_quant(
        gate, up, scale, scheme=quantizer.scheme, **quantizer.fixed, **decided
    )
    return quantizer.results(made, [])


def _example(quantizer: Quantizer) -> dict[str, Any]:
    return {
        "gate": tensor_example(3, 64),
        "up": tensor_example(3, 64),
        "quantizer": quantizer,
        **quantizer.example(),
    }


def _attrs(quantizer: Quantizer, **_: object) -> dict[str, Any]:
    return {"scheme": quantizer.scheme}


SILU_AND_MUL_QUANT = Rewrite(
    "silu_and_mul_quant",
    _pattern,
    _replacement,
    _example,
    attrs=_attrs,
    cases=[Case(q.scheme, {"quantizer": q}, q.needs) for q in QUANTIZERS],
)
