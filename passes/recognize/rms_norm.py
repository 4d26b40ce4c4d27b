"""Replace RMSNorm written in PyTorch by one op. The pattern is the op's reference, traced once per
style.

    x > to fp32 > square > mean > + eps > rsqrt > * x > (styles: round, * weight)
 =>
    rms_norm(x, weight)
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from atomc import ops
from atomc.ops.norm import RMS_NORM_STYLES
from atomc.rewriting.example import Example, norm_example, tensor_example
from atomc.rewriting.rewrite import Case, Rewrite, unsupported


def _example(style: str) -> Example:
    return {**norm_example(), "style": style}


def _attrs(x: Tensor, weight: Tensor, style: str, **_: object) -> dict[str, str]:
    return {"style": style, "weight": "as x" if weight.dtype == x.dtype else "fp32"}


# Most specific first: in fp32 the later styles also match models of the earlier ones.
RMS_NORM = Rewrite(
    "rms_norm",
    ops.rms_norm.reference,
    ops.rms_norm,
    _example,
    attrs=_attrs,
    cases=[Case(style, {"style": style}) for style in RMS_NORM_STYLES],
)


def _eps_after_root(x: Tensor, eps: float) -> Tensor:
    return x / (torch.sqrt(x.pow(2).mean(-1, keepdim=True)) + eps)


def _vector_norm(x: Tensor, scale: float, eps: float) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(x, 2, dim=-1, keepdim=True)
    return x / (norm * scale + eps)


def _clamped_vector_norm(x: Tensor, scale: float, eps: float) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(x, 2, dim=-1, keepdim=True)
    return x / (norm * scale).clamp(min=eps)


def _normalized(x: Tensor, scale: float, eps: float) -> Tensor:
    return F.normalize(x, dim=-1, eps=eps) * scale


def _half_precision(x: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def _wide_sum(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x.to(torch.float32) + residual.to(torch.float32)
    normed = total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype), total


def _residual() -> Example:
    return {
        "x": tensor_example(3, 10),
        "residual": tensor_example(3, 10),
        "weight": tensor_example(10),
        "eps": 1e-6,
    }


def _row() -> Example:
    return {"x": tensor_example(3, 10), "eps": 1e-6}


def _scaled_row() -> Example:
    return {**_row(), "scale": 0.3}


# Not equal to RMSNorm, and without an op.
_EPS_OUTSIDE = "eps outside of the root"
_CLAMPED = "a norm that is clamped, without eps under a root"
OTHER_NORMS = [
    unsupported("rms_norm", variant, pattern, example, needs, reason)
    for variant, pattern, example, needs, reason in (
        ("eps outside", _eps_after_root, _row, ["aten::sqrt", "aten::mean"], _EPS_OUTSIDE),
        ("x.norm", _vector_norm, _scaled_row, ["aten::linalg_vector_norm"], _EPS_OUTSIDE),
        ("clamped", _clamped_vector_norm, _scaled_row, ["aten::linalg_vector_norm"], _CLAMPED),
        ("normalize", _normalized, _scaled_row, ["aten::linalg_vector_norm"], _CLAMPED),
        (
            "16 bits",
            _half_precision,
            _row,
            ["aten::sqrt", "aten::mean"],
            "x / sqrt in 16 bits, which the op computes in fp32",
        ),
        (
            "wide sum",
            _wide_sum,
            _residual,
            ["aten::rsqrt", "aten::mean"],
            "a sum in fp32 with a residual, which the option rounding='hf' does not round",
        ),
    )
]
