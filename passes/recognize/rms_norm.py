"""RMSNorm written out becomes one op; the op's own meaning, traced once per style, is the pattern.

x > to fp32 > square > mean > + eps > rsqrt > * x > (styles: round, * weight)    =>    rms_norm(x,
                                                                                 weight)
"""

from typing import Any

from torch import Tensor

from atomc import ops
from atomc.ops.norm import RMS_NORM_STYLES
from atomc.rewriting.rewrite import Case, Rewrite, norm_weight_example, tensor_example


def _pattern(x: Tensor, weight: Tensor, eps: float, style: str) -> Tensor:
    return ops.rms_norm.reference(x, weight, eps, style)


def _replacement(x: Tensor, weight: Tensor, eps: float, style: str) -> Tensor:
    return ops.rms_norm(x, weight, eps, style)


def _example(style: str) -> dict[str, Any]:
    return {
        "x": tensor_example(3, 10),
        "weight": norm_weight_example(10),
        "eps": 1e-6,
        "style": style,
    }


def _attrs(x: Tensor, weight: Tensor, style: str, **_: object) -> dict[str, Any]:
    return {"style": style, "weight": "as x" if weight.dtype == x.dtype else "fp32"}


# Most specific first: in fp32 the later styles also fit what the earlier ones mean.
RMS_NORM = Rewrite(
    "rms_norm",
    _pattern,
    _replacement,
    _example,
    attrs=_attrs,
    cases=[Case(style, {"style": style}) for style in RMS_NORM_STYLES],
)
