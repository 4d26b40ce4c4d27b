"""Quantize the result of a norm behind a sum over processes in the same op.

x > allreduce_rms_norm -+- quantizer -> codes, scales    x > allreduce_rms_norm_quant -+-> codes,
                        +-> sum                       =>                               |   scales
                                                                                       +-> sum

The same with a residual: allreduce_add_rms_norm > quantizer => allreduce_add_rms_norm_quant. A norm
with other readers is written, too.
"""

from typing import Unpack

from torch import Tensor

from atomc import ops
from atomc.passes.fuse.quantizers import QUANTIZERS, Attributes, Quantizer
from atomc.rewriting.example import Example, norm_weight_example, tensor_example
from atomc.rewriting.rewrite import Case, Rewrite


def _pattern(
    x: Tensor,
    weight: Tensor,
    eps: float,
    process_group: str,
    style: str,
    quantizer: Quantizer,
    keep: bool,
    scale: Tensor | None,
    **captured: Unpack[Attributes],
) -> tuple[Tensor, ...]:
    y, total = ops.allreduce_rms_norm(x, weight, eps, process_group, style)
    return *quantizer(y, scale, **captured), total, *([y] * keep)


def _replacement(
    x: Tensor,
    weight: Tensor,
    eps: float,
    process_group: str,
    style: str,
    quantizer: Quantizer,
    keep: bool,
    scale: Tensor | None,
    **captured: Unpack[Attributes],
) -> Tensor | tuple[Tensor, ...]:
    made = ops.allreduce_rms_norm_quant(
        x,
        weight,
        eps,
        process_group,
        scale,
        style,
        scheme=quantizer.scheme,
        keep=keep,
        **quantizer.attributes(captured),
    )
    return quantizer.results(made, [2, 3] if keep else [2])


def _example(quantizer: Quantizer, keep: bool) -> Example:
    return {
        "x": tensor_example(3, 64),
        "weight": norm_weight_example(64),
        "eps": 1e-6,
        "process_group": "a group",
        "style": "after",
        "quantizer": quantizer,
        "keep": keep,
        **quantizer.example(),
    }


def _add_pattern(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    process_group: str,
    style: str,
    quantizer: Quantizer,
    keep: bool,
    scale: Tensor | None,
    **captured: Unpack[Attributes],
) -> tuple[Tensor, ...]:
    y, total = ops.allreduce_add_rms_norm(x, residual, weight, eps, process_group, style)
    return *quantizer(y, scale, **captured), total, *([y] * keep)


def _add_replacement(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    process_group: str,
    style: str,
    quantizer: Quantizer,
    keep: bool,
    scale: Tensor | None,
    **captured: Unpack[Attributes],
) -> Tensor | tuple[Tensor, ...]:
    made = ops.allreduce_add_rms_norm_quant(
        x,
        residual,
        weight,
        eps,
        process_group,
        scale,
        style,
        scheme=quantizer.scheme,
        keep=keep,
        **quantizer.attributes(captured),
    )
    return quantizer.results(made, [2, 3] if keep else [2])


def _add_example(quantizer: Quantizer, keep: bool) -> Example:
    return {**_example(quantizer, keep), "residual": tensor_example(3, 64)}


def _attrs(quantizer: Quantizer, keep: bool, **_: object) -> dict[str, str | bool]:
    return {"scheme": quantizer.scheme, **({"keep": True} if keep else {})}


_CASES = [
    Case(
        f"{quantizer.scheme}{', kept' * keep}",
        {"quantizer": quantizer, "keep": keep},
        quantizer.needs,
    )
    for quantizer in QUANTIZERS
    for keep in (False, True)
]
ALLREDUCE_RMS_NORM_QUANT = Rewrite(
    "allreduce_rms_norm_quant",
    _pattern,
    _replacement,
    _example,
    attrs=_attrs,
    needs={"allreduce_rms_norm": {}},
    cases=_CASES,
)
ALLREDUCE_ADD_RMS_NORM_QUANT = Rewrite(
    "allreduce_add_rms_norm_quant",
    _add_pattern,
    _add_replacement,
    _add_example,
    attrs=_attrs,
    needs={"allreduce_add_rms_norm": {}},
    cases=_CASES,
)
