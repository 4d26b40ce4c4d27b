"""Replace LayerNorm that is written out by one op.

   x > to fp32 > - mean > square > mean > + eps > rsqrt > * (x - mean) > * weight (> + bias) > round
=>
   layer_norm(x, weight, bias)
"""

import torch
from torch import Tensor

from atomc import ops
from atomc.rewriting.example import Example, tensor_example
from atomc.rewriting.rewrite import Case, Rewrite


def _pattern(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    x_f32 = x.to(torch.float32)
    centered = x_f32 - x_f32.mean(-1, keepdim=True)
    y = centered * torch.rsqrt(centered.pow(2).mean(-1, keepdim=True) + eps)
    y = weight.to(torch.float32) * y
    return (y if bias is None else y + bias.to(torch.float32)).to(x.dtype)


def _example(biased: bool) -> Example:
    return {
        "x": tensor_example(3, 10),
        "weight": tensor_example(10),
        "bias": tensor_example(10) if biased else None,
        "eps": 1e-6,
    }


LAYER_NORM = Rewrite(
    "layer_norm",
    _pattern,
    ops.layer_norm,
    _example,
    needs={"aten::sub": {}, "aten::mean": {}, "aten::rsqrt": {}},
    cases=[Case("bias", {"biased": True}), Case("no bias", {"biased": False})],
)
