"""Quantize the result of a norm in the same op, which also writes it if it has other readers.

x > rms_norm > y -+- quantizer -> codes, scales        x > rms_norm_quant -+-> codes, scales
                  +-> y                          =>                        +-> y

x, r > add_rms_norm -+- quantizer -> codes, scales     x, r > add_rms_norm_quant -+-> codes, scales
                     +-> sum                     =>                               +-> sum
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
    style: str,
    quantizer: Quantizer,
    keep: bool,
    scale: Tensor | None,
    **captured: Unpack[Attributes],
) -> tuple[Tensor, ...]:
    y = ops.rms_norm(x, weight, eps, style)
    quantized = quantizer(y, scale, **captured)
    return (*quantized, y) if keep else quantized


def _replacement(
    x: Tensor,
    weight: Tensor,
    eps: float,
    style: str,
    quantizer: Quantizer,
    keep: bool,
    scale: Tensor | None,
    **captured: Unpack[Attributes],
) -> Tensor | tuple[Tensor, ...]:
    made = ops.rms_norm_quant(
        x,
        weight,
        eps,
        scale,
        style,
        scheme=quantizer.scheme,
        keep=keep,
        **quantizer.attributes(captured),
    )
    return quantizer.results(made, [2] * keep)


def _example(quantizer: Quantizer, keep: bool) -> Example:
    return {
        "x": tensor_example(3, 64),
        "weight": norm_weight_example(64),
        "eps": 1e-6,
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
    style: str,
    quantizer: Quantizer,
    keep: bool,
    scale: Tensor | None,
    **captured: Unpack[Attributes],
) -> tuple[Tensor, ...]:
    y, total = ops.add_rms_norm(x, residual, weight, eps, style)
    quantized = quantizer(y, scale, **captured)
    return (*quantized, total, y) if keep else (*quantized, total)


def _add_replacement(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    style: str,
    quantizer: Quantizer,
    keep: bool,
    scale: Tensor | None,
    **captured: Unpack[Attributes],
) -> Tensor | tuple[Tensor, ...]:
    made = ops.add_rms_norm_quant(
        x,
        residual,
        weight,
        eps,
        scale,
        style,
        scheme=quantizer.scheme,
        keep=keep,
        **quantizer.attributes(captured),
    )
    return quantizer.results(made, [2, 3] if keep else [2])


def _add_example(quantizer: Quantizer, keep: bool) -> Example:
    return {
        "x": tensor_example(3, 64),
        "residual": tensor_example(3, 64),
        **_example(quantizer, keep),
    }


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
RMS_NORM_QUANT = Rewrite(
    "rms_norm_quant", _pattern, _replacement, _example, attrs=_attrs, cases=_CASES
)
ADD_RMS_NORM_QUANT = Rewrite(
    "add_rms_norm_quant", _add_pattern, _add_replacement, _add_example, attrs=_attrs, cases=_CASES
)
