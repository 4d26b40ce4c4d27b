"""Gated activations: act(gate) * up (Shazeer 2020, "GLU Variants Improve Transformer")."""

import torch
import torch.nn.functional as F
from torch import Tensor

from atomc.ops.op import Op, op
from atomc.ops.op_traits import Kind


@op(kind=Kind.GATE, rows=None)
def silu_and_mul(gate: Tensor, up: Tensor) -> Tensor:
    """SwiGLU: silu(gate) * up. Both [..., I] -> [..., I] in their promoted dtype; silu(gate) is
    rounded to gate.dtype.
    """
    return F.silu(gate) * up


@op(kind=Kind.GATE, rows=None)
def gelu_and_mul(gate: Tensor, up: Tensor, approximate: str = "none") -> Tensor:
    """GeGLU: gelu(gate) * up. Both [..., I] -> [..., I] in their promoted dtype; gelu(gate) is
    rounded to gate.dtype. approximate: "none" (erf) or "tanh" (Gemma).
    """
    return F.gelu(gate, approximate=approximate) * up


@op(kind=Kind.GATE, rows=None)
def sigmoid_and_mul(gate: Tensor, up: Tensor, added: Tensor | None = None) -> Tensor:
    """GLU: sigmoid(gate) * up, plus `added` (Dauphin et al. 2017, "Language Modeling with Gated
    Convolutional Networks"; the gates of attention and of the shared expert of Qwen3.5). gate
    [..., I] or [..., 1], the others [..., I] -> [..., I]. Each step is rounded to its dtype.
    """
    gated = torch.sigmoid(gate) * up
    return gated if added is None else added + gated


# What moe_experts calls an activation -> the op of a gate that has it, and its arguments.
GATES: dict[str, tuple[Op, dict[str, str]]] = {
    "silu": (silu_and_mul, {}),
    "gelu": (gelu_and_mul, {"approximate": "none"}),
    "gelu_tanh": (gelu_and_mul, {"approximate": "tanh"}),
}
