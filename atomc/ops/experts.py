"""Mixtures of experts: each token goes through the gated MLPs of its experts, which topk_route
chose.

T tokens, k experts of each, E experts, H width of the model, I width of an expert. `w13` stacks the
rows of gate and up, `w2` is down. An id outside 0..E-1 (an expert of another device) adds nothing.
"""

from collections.abc import Callable
from typing import Annotated, TypedDict, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from atomc.ops.linear import linear
from atomc.ops.op import op
from atomc.ops.op_cost import experts
from atomc.ops.op_shapes import shape_of_x
from atomc.ops.op_traits import Kind

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "swiglu_oai")


class Gate(TypedDict, total=False):
    """What is between the products of an expert: options of moe_experts, explained in `gated`."""

    activation: Annotated[str, "silu"]
    interleaved: Annotated[bool, False]
    alpha: Annotated[float, 1.702]
    limit: Annotated[float | None, None]


class ExpertOperands(Gate):
    """The arguments of moe_experts and of its forms for quantized weights, which explain them."""

    x: Tensor
    ids: Tensor
    weights: Tensor
    w13: Tensor
    w2: Tensor
    b13: Tensor | None
    b2: Tensor | None


def gate_and_up(h: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """h [..., 2I] -> gate and up [..., I]: its halves, or, interleaved, its even and odd columns
    (GPT-OSS).
    """
    if interleaved:
        return h[..., ::2], h[..., 1::2]
    gate, up = h.chunk(2, -1)
    return gate, up


def gated(
    h: Tensor, activation: str, interleaved: bool, alpha: float, limit: float | None
) -> Tensor:
    """h [..., 2I] -> act(gate) * up [..., I], each step rounded to h.dtype.

    activation  "silu", "gelu" (erf), "gelu_tanh"; "swiglu_oai": gate * sigmoid(alpha * gate) * (up
                + 1) (GPT-OSS)
    limit       gate is clamped to at most limit, up to -limit..limit, before anything else

    Raises ValueError for an unknown activation.
    """
    gate, up = gate_and_up(h, interleaved)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return activated(gate, up, activation, alpha)


def activated(gate: Tensor, up: Tensor, activation: str, alpha: float) -> Tensor:
    """`gated` for gate and up [..., I], which are clamped already."""
    if activation == "silu":
        return F.silu(gate) * up
    if activation == "gelu":
        return F.gelu(gate) * up
    if activation == "gelu_tanh":
        return F.gelu(gate, approximate="tanh") * up
    if activation == "swiglu_oai":
        return (up + 1) * (gate * torch.sigmoid(gate * alpha))
    raise ValueError(f"activation of experts {activation!r} is not one of {ACTIVATIONS}")


def sum_over_experts(
    ids: Tensor,
    weights: Tensor,
    num_experts: int,
    products: Tensor,
    expert: Callable[[int, Tensor], Tensor],
) -> Tensor:
    """The weighted sum [T, H] of expert(e, rows [n] int64) -> [n, H], in the dtype of products.

    products  zeros [T, k, H]: the results before weighting, in place. A product of a result and its
              weight is in their promoted dtype, the sum over k in fp32.
    """
    for e in range(num_experts):
        rows, choices = (ids == e).nonzero(as_tuple=True)
        if len(rows):
            products[rows, choices] = expert(e, rows)
    weighted = products * weights.unsqueeze(-1)
    return weighted.sum(1, dtype=torch.float32).to(products.dtype)


def sequential_experts(
    product: Callable[[Tensor, Tensor, Tensor | None], Tensor],
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: Tensor,
    w2: Tensor,
    b13: Tensor | None,
    b2: Tensor | None,
    weight_on_input: bool,
    **gate: Unpack[Gate],
) -> Tensor:
    """moe_experts, one expert after another. product: of rows, a weight and a bias, as F.linear."""

    def expert(e: int, rows: Tensor) -> Tensor:
        h = product(given(e, rows), w13[e], None if b13 is None else b13[e])
        return product(gated(h, **gate), w2[e], None if b2 is None else b2[e])

    def given(e: int, rows: Tensor) -> Tensor:
        if not weight_on_input:
            return x[rows]
        weight = weights[rows][ids[rows] == e]
        return (x[rows] * weight.unsqueeze(-1)).to(x.dtype)

    products = x.new_zeros(*ids.shape, x.shape[-1])
    applied = torch.ones_like(weights) if weight_on_input else weights
    return sum_over_experts(ids, applied, len(w13), products, expert)


@op(kind=Kind.EXPERTS, rows="x", cost=experts, shape=shape_of_x, linear=lambda _: linear)
def moe_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: Tensor,
    w2: Tensor,
    b13: Tensor | None = None,
    b2: Tensor | None = None,
    *,
    weight_on_input: bool = False,
    **gate: Unpack[Gate],
) -> Tensor:
    """sum over k of weights * (w2[id] @ gated(w13[id] @ x + b13[id]) + b2[id]). x [T, H] -> [T, H]
    in x.dtype (Shazeer et al. 2017).

    ids, weights  [T, k] int32 or int64, and any float dtype
    w13, b13      [E, 2I, H] and [E, 2I]: gate over up, or row by row in turn if interleaved
    w2, b2        [E, H, I] and [E, H]
    activation, alpha, limit  see `gated`
    weight_on_input  a weight multiplies the expert's input instead of its result (Llama 4), in
                     their promoted dtype, rounded to x.dtype
    """
    operands = x, ids, weights, w13, w2, b13, b2
    return sequential_experts(F.linear, *operands, weight_on_input, **gate)
