"""Fold a residual add into the norm that follows it.

x -+                              x -+
   add -+- rms_norm -> y    =>       add_rms_norm -+-> y
r -+    +-> sum                   r -+             +-> sum
"""

from torch import Tensor

from atomc import ops
from atomc.rewriting.example import Example, norm_example, tensor_example
from atomc.rewriting.rewrite import Case, Rewrite


def _rms_pattern(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, style: str
) -> tuple[Tensor, Tensor]:
    total = x + residual
    return ops.rms_norm(total, weight, eps, style), total


def _rms_example() -> Example:
    return norm_example("residual")


def _rms_attrs(x: Tensor, weight: Tensor, **_: object) -> dict[str, str]:
    return {"weight": "as x" if weight.dtype == x.dtype else "fp32"}


def _layer_pattern(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    total = x + residual
    return ops.layer_norm(total, weight, bias, eps), total


def _layer_example(weighted: bool, biased: bool) -> Example:
    return {
        "x": tensor_example(3, 10),
        "residual": tensor_example(3, 10),
        "weight": tensor_example(10) if weighted else None,
        "bias": tensor_example(10) if biased else None,
        "eps": 1e-6,
    }


ADD_RMS_NORM = Rewrite(
    "add_rms_norm",
    _rms_pattern,
    ops.add_rms_norm,
    _rms_example,
    sees_through=True,
    attrs=_rms_attrs,
)
ADD_LAYER_NORM = Rewrite(
    "add_layer_norm",
    _layer_pattern,
    ops.add_layer_norm,
    _layer_example,
    sees_through=True,
    cases=[
        Case("", {"weighted": True, "biased": True}),
        Case("no bias", {"weighted": True, "biased": False}),
        Case("no weight", {"weighted": False, "biased": False}),
    ],
)
