"""Linear layers and embedding look-up."""

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from atomc.ops.op import op
from atomc.ops.op_cost import lookup, product
from atomc.ops.op_shapes import rows_of_product
from atomc.ops.op_traits import Arguments, Kind


def stacked(names: tuple[str, ...], calls: Sequence[Arguments]) -> tuple[str, ...]:
    """Linear layers with one input are one layer with these parameters concatenated, and biases."""
    return names if calls[0]["bias"] is None else (*names, "bias")


@op(
    kind=Kind.LINEAR,
    rows="x",
    cost=product,
    shape=rows_of_product,
    concat=partial(stacked, ("weight",)),
)
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias. x [..., K], weight [N, K], bias [N] of one dtype -> [..., N]."""
    return F.linear(x, weight, bias)


@op(
    kind=Kind.LINEAR,
    rows="x",
    cost=product,
    shape=partial(rows_of_product, out_dtype=torch.float32),
)
def linear_fp32(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T in fp32. x [..., K], weight [N, K] of one 16-bit dtype -> [..., N].
    Products of such numbers are exact in fp32, so that kernels differ only in the order of sums.
    """
    return F.linear(x.to(torch.float32), weight.to(torch.float32))


@op(kind=Kind.LOOKUP, rows=None, cost=lookup)
def embedding(ids: Tensor, weight: Tensor) -> Tensor:
    """Rows of weight. ids [...] int32 or int64, weight [V, D] -> [..., D] in weight.dtype."""
    return F.embedding(ids, weight)
