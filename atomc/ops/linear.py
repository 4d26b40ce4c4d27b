"""Linear layers and embedding look-up."""

import torch.nn.functional as F
from torch import Tensor

from atomc.op import op


def linear_shape(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


@op(shape=linear_shape)
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias. x [..., K], weight [N, K], bias [N] -> [..., N]."""
    return F.linear(x, weight, bias)


@op
def embedding(ids: Tensor, weight: Tensor) -> Tensor:
    """Rows of weight. ids [...] int, weight [V, D] -> [..., D]."""
    return F.embedding(ids, weight)
