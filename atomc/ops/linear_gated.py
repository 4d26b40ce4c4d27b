"""The linear layer to gate and up of a gated MLP, with the gate (Shazeer 2020, "GLU Variants
Improve Transformer").
"""

import torch.nn.functional as F
from torch import Tensor

from atomc.ops.experts import activated
from atomc.ops.op import op
from atomc.ops.op_cost import product
from atomc.ops.op_traits import Kind


@op(kind=Kind.LINEAR, rows="x", cost=product)
def linear_gated(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str = "silu"
) -> Tensor:
    """activation(gate) * up, where gate and up are the halves of linear(x, weight, bias). x
    [..., K], weight [2 I, K], bias [2 I] of one dtype -> [..., I]. activation: "silu", "gelu" or
    "gelu_tanh"; each step is rounded to the dtype.
    """
    gate, up = F.linear(x, weight, bias).chunk(2, -1)
    return activated(gate, up, activation, 1.0)
