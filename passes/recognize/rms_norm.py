"""Replace RMSNorm written in PyTorch by one op. The pattern is the op's reference, traced once per
style.

    x > to fp32 > square > mean > + eps > rsqrt > * x > (styles: round, * weight)
 =>
    rms_norm(x, weight)
"""

from torch import Tensor

from atomc import ops
from atomc.ops.norm import RMS_NORM_STYLES
from atomc.rewriting.example import Example, norm_weight_example, tensor_example
from atomc.rewriting.rewrite import Case, Rewrite


def _pattern(x: Tensor, weight: Tensor, eps: float, style: str) -> Tensor:
    return ops.rms_norm.reference(x, weight, eps, style)


def _replacement(x: Tensor, weight: Tensor, eps: float, style: str) -> Tensor:
    return ops.rms_norm(x, weight, eps, style)


def _example(style: str) -> Example:
    return {
        "x": tensor_example(3, 10),
        "weight": norm_weight_example(10),
        "eps": 1e-6,
        "style": style,
    }


def _attrs(x: Tensor, weight: Tensor, style: str, **_: object) -> dict[str, str]:
    return {"style": style, "weight": "as x" if weight.dtype == x.dtype else "fp32"}


# Most specific first: in fp32 the later styles also match models of the earlier ones.
RMS_NORM = Rewrite(
    "rms_norm",
    _pattern,
    _replacement,
    _example,
    attrs=_attrs,
    cases=[Case(style, {"style": style}) for style in RMS_NORM_STYLES],
)
