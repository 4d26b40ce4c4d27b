"""Quantize the result of a norm in the same op, which also writes it if it has other readers.

x > rms_norm > y -+- quantizer -> codes, scales        x > rms_norm_quant -+-> codes, scales
                  +-> y                          =>                        +-> y

x, r > add_rms_norm -+- quantizer -> codes, scales     x, r > add_rms_norm_quant -+-> codes, scales
                     +-> sum                     =>                               +-> sum
"""

from collections.abc import Callable

from torch import Tensor

from atomc import ops
from atomc.ops.op import OpFunction
from atomc.ops.schemes import Attributes
from atomc.passes.fuse.quantizers import QUANTIZERS, Quantizer
from atomc.rewriting.example import Example, norm_example
from atomc.rewriting.rewrite import Case, Needs, Rewrite


def quantizing(
    norm: OpFunction[..., Tensor | tuple[Tensor, ...]],
    fused: OpFunction[..., tuple[Tensor, ...]],
    example: Callable[[Quantizer, bool], Example],
    needs: Needs,
) -> Rewrite:
    """The rewrite of a norm and any quantizer of its result to `fused`, which takes the arguments
    of the norm, a scale before the style, and keeps the sum that the norm returns.
    """
    names = [name for name in norm.signature.parameters if name != "keep_sum"]

    def split(arguments: dict[str, object]) -> tuple[list[object], Attributes]:
        """The arguments of the norm, and the captured attributes of the quantizer."""
        attributes = {name: x for name, x in arguments.items() if name not in names}
        return [arguments[name] for name in names], attributes  # type: ignore[return-value]

    def pattern(
        quantizer: Quantizer, keep: bool, scale: Tensor | None, **arguments: object
    ) -> tuple[Tensor, ...]:
        operands, captured = split(arguments)
        results = norm(*operands)
        y, *total = results if isinstance(results, tuple) else (results,)
        return *quantizer(y, scale, **captured), *total, *[y] * keep

    def replacement(
        quantizer: Quantizer, keep: bool, scale: Tensor | None, **arguments: object
    ) -> Tensor | tuple[Tensor, ...]:
        (*operands, style), captured = split(arguments)
        attributes = quantizer.attributes(captured)
        results = fused(*operands, scale, style, scheme=quantizer.scheme, keep=keep, **attributes)
        return quantizer.results(results, range(2, len(norm.overload._schema.returns) + 1 + keep))

    def attrs(quantizer: Quantizer, keep: bool, **_: object) -> dict[str, str | bool]:
        return {"scheme": quantizer.scheme, **({"keep": True} if keep else {})}

    cases = [
        Case(f"{q.scheme}{', kept' * keep}", {"quantizer": q, "keep": keep}, q.needs)
        for q in QUANTIZERS
        for keep in (False, True)
    ]
    return Rewrite(fused.name, pattern, replacement, example, attrs=attrs, needs=needs, cases=cases)


def quantized_example(quantizer: Quantizer, keep: bool, norm: Example) -> Example:
    """The example of a norm with these arguments, and a quantizer of its result."""
    return {**norm, "quantizer": quantizer, "keep": keep, **quantizer.example()}


def _example(quantizer: Quantizer, keep: bool) -> Example:
    return quantized_example(quantizer, keep, norm_example(width=64))


def _add_example(quantizer: Quantizer, keep: bool) -> Example:
    return quantized_example(quantizer, keep, norm_example("residual", width=64))


RMS_NORM_QUANT = quantizing(ops.rms_norm, ops.rms_norm_quant, _example, {})
ADD_RMS_NORM_QUANT = quantizing(ops.add_rms_norm, ops.add_rms_norm_quant, _add_example, {})
