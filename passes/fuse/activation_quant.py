"""A gated activation quantizes its own result.

    gate, up > silu_and_mul > quantizer -> codes, scales   =>   gate, up > silu_and_mul_quant -> codes, scales
"""

from typing import Any

from torch import Tensor

from atomc import ops
from atomc.passes.fuse.quantizers import QUANTIZERS, Quantizer, scale_example
from atomc.rewrite import Rewrite, tensor_example


def _rewrite(quantizer: Quantizer) -> Rewrite:
    def pattern(gate: Tensor, up: Tensor, scale: Tensor | None) -> Any:
        return quantizer(ops.silu_and_mul(gate, up), scale)

    def replacement(gate: Tensor, up: Tensor, scale: Tensor | None) -> Any:
        made = ops.silu_and_mul_quant(gate, up, scale, scheme=quantizer.scheme, **quantizer.fused)
        return quantizer.results(made, [])

    example = {"gate": tensor_example(3, 64), "up": tensor_example(3, 64)}
    if quantizer.is_static:
        example["scale"] = scale_example()
    return Rewrite("silu_and_mul_quant", quantizer.with_scale(pattern), quantizer.with_scale(replacement), lambda: example,
                   variant=quantizer.name, attrs={"scheme": quantizer.scheme},
                   needs=quantizer.needs)  # fmt: skip


SILU_AND_MUL_QUANT = [_rewrite(quantizer) for quantizer in QUANTIZERS]
