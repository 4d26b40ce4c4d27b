"""RMSNorm whose result is multiplied by a gate, as at the end of a gated delta net."""

import torch
import torch.nn.functional as F
from torch import Tensor

from atomc.ops.norm import norm_op, rms_norm
from atomc.ops.op_traits import Kind


@norm_op(kind=Kind.NORM)
def rms_norm_gated(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, style: str = "after"
) -> Tensor:
    """rms_norm(x) * silu(gate), the gate in fp32. x and gate [..., D], weight [D] -> [..., D] in
    x.dtype (Qwen3.5, Qwen3-Next).
    """
    y = rms_norm.reference(x, weight, eps, style)
    return (y * F.silu(gate.to(torch.float32))).to(x.dtype)
