"""Multiply the result of a norm by its gate in the same op (Qwen3.5, Qwen3-Next).

x > rms_norm ----------+
gate > to fp32 > silu -+- * > to x.dtype    =>    rms_norm_gated(x, gate)
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from atomc import ops
from atomc.rewriting.example import Example, norm_example
from atomc.rewriting.rewrite import Rewrite


def _pattern(x: Tensor, gate: Tensor, weight: Tensor, eps: float, style: str) -> Tensor:
    y = ops.rms_norm(x, weight, eps, style)
    return (y * F.silu(gate.to(torch.float32))).to(x.dtype)


def _example() -> Example:
    return norm_example("gate")


RMS_NORM_GATED = Rewrite(
    "rms_norm_gated", _pattern, ops.rms_norm_gated, _example, needs={"rms_norm": {}}
)
