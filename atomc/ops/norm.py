"""RMSNorm and LayerNorm over the last dimension, alone and after a residual add, whose sum is
returned, too; without `keep_sum` it is empty, [0].

Three RMSNorm styles, which differ in the order of rounding and scaling, cover the stock models:
after     round the normalized row to x.dtype, then multiply by the weight (Llama, Qwen3, Mistral,
          DeepSeek)
before    multiply in fp32, round once (GPT-OSS, torch.nn.functional.rms_norm)
one_plus  multiply by 1 + weight in fp32, round once (Gemma, Qwen3.5)
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from atomc.ops.op import op
from atomc.ops.op_traits import Arguments, Kind

RMS_NORM_STYLES = ("one_plus", "after", "before")


def _rounds_once(arguments: Arguments) -> bool:
    return bool(arguments["style"] != "after")


# Of an op with an RMSNorm of rows, whose style says whether the reference rounds only its result.
norm_op = partial(op, rows="x", rounds_once=_rounds_once)


def normed_shape(x: Tensor, weight: Tensor, style: str) -> Tensor:
    """An empty tensor as `rms_norm` returns it."""
    return torch.empty_like(x, dtype=torch.result_type(x, weight) if style == "after" else x.dtype)


@norm_op(kind=Kind.NORM)
def rms_norm(x: Tensor, weight: Tensor, eps: float, style: str = "after") -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight. x [..., D], weight [D] -> [..., D] (Zhang and Sennrich
    2019, eq. 4).

    In x.dtype, except that "after" with a wider weight promotes, as it does in Hugging Face.
    """
    x_f32 = x.to(torch.float32)
    y = x_f32 * torch.rsqrt(x_f32.pow(2).mean(-1, keepdim=True) + eps)
    if style == "after":
        return weight * y.to(x.dtype)
    if style == "before":
        return (weight * y).to(x.dtype)
    if style == "one_plus":
        return (y * (1.0 + weight.to(torch.float32))).to(x.dtype)
    raise ValueError(f"rms_norm: style {style!r} is not one of {RMS_NORM_STYLES}")


@norm_op(kind=Kind.NORM)
def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    style: str = "after",
    *,
    keep_sum: bool = True,
) -> tuple[Tensor, Tensor]:
    """rms_norm(x + residual), and the sum, which is the next residual. x and residual [..., D],
    weight [D] -> both [..., D], the sum in the promoted dtype of x and residual.
    """
    total = x + residual
    y = rms_norm.reference(total, weight, eps, style)
    return y, total if keep_sum else total.new_empty(0)


@op(kind=Kind.NORM, rows="x")
def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """(x - mean) / sqrt(var + eps) * weight + bias over the last dimension (Ba et al. 2016). x
    [..., D], weight and bias [D] or None -> [..., D] in x.dtype.
    """
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


@op(kind=Kind.NORM, rows="x")
def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    *,
    keep_sum: bool = True,
) -> tuple[Tensor, Tensor]:
    """layer_norm(x + residual), and the sum, which is the next residual. x and residual [..., D],
    weight and bias [D] -> both [..., D].
    """
    total = x + residual
    y = layer_norm.reference(total, weight, bias, eps)
    return y, total if keep_sum else total.new_empty(0)
