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

OfExperts = tuple[Tensor | None, ...]  # tensors [E, ...]
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


def one_by_one(
    ids: Tensor,
    weights: Tensor | None,
    operands: tuple[Tensor, ...],
    product: Callable[..., Tensor],
    up: OfExperts,
    between: Callable[[Tensor], tuple[Tensor, ...]],
    down: OfExperts,
) -> Tensor:
    """The weighted sums [T, H] of the choices, in the dtype of `product`. The pairs p of a token
    p // k and a choice are sorted by expert, and each expert that is hit multiplies its rows once.
    The host waits for `ids` [T, k].

    weights   [T, k]; None: all 1
    operands  tensors [T, ...], or [T * k, ...] with a row per pair
    product   (*rows of operands, *tensors of one expert) -> [n, N]
    up, down  the tensors of all experts, each [E, ...] or None; the first are weights
    between   [m, 2I], all rows in the order of experts -> the operands of down, [m, ...]
    """
    assert up[0] is not None
    num_experts = len(up[0])
    flat = ids.flatten()
    valid = (flat >= 0) & (flat < num_experts)
    order = flat.where(valid, num_experts).argsort(stable=True)
    counts = torch.bincount(flat[valid], minlength=num_experts).tolist()
    hit = [(e, count) for e, count in enumerate(counts) if count]
    order = order[: sum(counts)]

    def products(operands: tuple[Tensor, ...], of_experts: OfExperts) -> Tensor:
        def one(e: int, *rows: Tensor) -> Tensor:
            return product(*rows, *(None if x is None else x[e] for x in of_experts))

        parts = [torch.split(x, [count for _, count in hit]) for x in operands]
        rows = zip(*parts, strict=True)
        if hit:
            return torch.cat([one(e, *own) for (e, _), own in zip(hit, rows, strict=True)])
        return one(0, *operands)  # no rows

    token = order // ids.shape[1]
    rows = tuple(x[token if len(x) == len(ids) else order] for x in operands)
    sums = products(between(products(rows, up)), down)
    if len(order) == len(flat):
        by_pair = torch.empty_like(sums)
    else:
        by_pair = sums.new_zeros(len(flat), sums.shape[1])
    by_pair[order] = sums
    return weighted_sum(by_pair, ids, weights)


def weighted_sum(by_pair: Tensor, ids: Tensor, weights: Tensor | None) -> Tensor:
    """by_pair [T * k, H], ids and weights [T, k] -> [T, H]. A product of a result and its weight is
    in their promoted dtype, the sum over k in fp32.
    """
    products = by_pair.view(*ids.shape, by_pair.shape[1])
    if weights is not None:
        products = products * weights.unsqueeze(-1)
    return products.sum(1, dtype=torch.float32).to(by_pair.dtype)


def experts_by(
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
    """moe_experts. product: of rows, a weight and a bias, as F.linear."""
    applied: Tensor | None = weights
    if weight_on_input:
        x = (x.unsqueeze(1) * weights.unsqueeze(-1)).to(x.dtype).flatten(0, 1)
        applied = None
    return one_by_one(
        ids, applied, (x,), product, (w13, b13), lambda h: (gated(h, **gate),), (w2, b2)
    )


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
    return experts_by(F.linear, *operands, weight_on_input, **gate)
