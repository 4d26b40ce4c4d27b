"""Routers: which experts a token goes to, and with what weights."""

from typing import Annotated, Required, TypedDict, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from atomc.ops.linear import linear
from atomc.ops.op import op
from atomc.ops.op_cost import OpCall, Work, product, read_and_write
from atomc.ops.op_traits import Kind

SCORES = ("softmax", "softmax_of_chosen", "sigmoid", "sqrt_softplus")
GROUP_SCORES = ("max", "top2")


class ExpertChoice(TypedDict, total=False):
    """How experts are chosen: options of topk_route, which explains them."""

    k: Required[int]
    score: Annotated[str, "softmax"]
    groups: Annotated[int, 1]
    topk_groups: Annotated[int, 1]
    group_score: Annotated[str, "max"]
    renormalize: Annotated[bool, False]
    eps: Annotated[float, 0.0]
    min_sum: Annotated[float, 0.0]
    scale: Annotated[float, 1.0]
    dtype: Annotated[torch.dtype, torch.float32]
    in_order: Annotated[bool, True]


def _scores(logits: Tensor, score: str) -> Tensor:
    """fp32 [T, E]; the logits themselves for a softmax over those that are chosen."""
    if score == "softmax":
        return logits.softmax(-1, dtype=torch.float32)
    if score == "softmax_of_chosen":
        return logits.to(torch.float32)
    if score == "sigmoid":
        return logits.to(torch.float32).sigmoid()
    if score == "sqrt_softplus":
        return F.softplus(logits.to(torch.float32)).sqrt()
    raise ValueError(f"router score {score!r} is not one of {SCORES}")


def _masked_scores(scores: Tensor, groups: int, topk_groups: int, group_score: str) -> Tensor:
    """The scores, -inf outside the best groups. Groups are neighbouring experts, all of one
    size.
    """
    grouped = scores.reshape(*scores.shape[:-1], groups, -1)
    if group_score == "max":
        best = grouped.amax(-1)
    elif group_score == "top2":
        best = grouped.topk(min(2, grouped.shape[-1]), -1).values.sum(-1)
    else:
        raise ValueError(f"group score {group_score!r} is not one of {GROUP_SCORES}")
    chosen = best.topk(topk_groups, -1, sorted=False).indices
    kept = torch.zeros_like(best, dtype=torch.bool).scatter(-1, chosen, True)
    return grouped.masked_fill(~kept.unsqueeze(-1), float("-inf")).flatten(-2)


def _route_shape(x: Tensor, k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    shape = (*x.shape[:-1], k)
    return x.new_empty(shape, dtype=dtype), x.new_empty(shape, dtype=torch.int32)


@op(
    kind=Kind.ROUTE,
    rows="logits",
    shape=lambda logits, k, dtype: _route_shape(logits, k, dtype),
)
def topk_route(
    logits: Tensor,
    bias: Tensor | None = None,
    *,
    k: int,
    score: str = "softmax",
    groups: int = 1,
    topk_groups: int = 1,
    group_score: str = "max",
    renormalize: bool = False,
    eps: float = 0.0,
    min_sum: float = 0.0,
    scale: float = 1.0,
    dtype: torch.dtype = torch.float32,
    in_order: bool = True,
) -> tuple[Tensor, Tensor]:
    """The k experts of each token. logits [T, E] of any float dtype -> weights [T, k] in dtype, ids
    [T, k] int32; equal scores as torch.topk orders them. All arithmetic is in fp32, and the weights
    are rounded once.

    score        "softmax" over all experts (Qwen3-MoE, Mixtral), "softmax_of_chosen" over the k
                 chosen ones (GPT-OSS, Granite), "sigmoid" (DeepSeek-V3, section 2.1.2; GLM-4.5),
                 "sqrt_softplus" (DeepSeek-V4)
    bias         fp32 [E]: added to the scores for the choice, not to the weights
    groups       experts are chosen from the best topk_groups of so many groups of neighbours;
                 group_score: a group's "max", or the sum of its "top2"
    renormalize  weights are divided by max(sum, min_sum) + eps
    scale        of the weights, last
    in_order     both are in the order of falling scores; False: in any order, the same for both

    Raises ValueError for an unknown score.
    """
    scores = _scores(logits, score)
    choice = scores if bias is None else scores + bias.to(torch.float32)
    if groups > 1:
        choice = _masked_scores(choice, groups, topk_groups, group_score)
    ids = choice.topk(k, -1, sorted=in_order).indices
    weights = scores.gather(-1, ids)
    if score == "softmax_of_chosen":
        weights = weights.softmax(-1)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True).clamp(min=min_sum) + eps)
    if scale != 1.0:
        weights = weights * scale
    return weights.to(dtype), ids.to(torch.int32)


def _route_product(call: OpCall) -> Work:
    moved, _ = read_and_write(call)
    return moved, product(call)[1]


@op(
    kind=Kind.LINEAR | Kind.ROUTE,
    rows="x",
    cost=_route_product,
    shape=_route_shape,
)
def linear_topk_route(
    x: Tensor,
    weight: Tensor,
    linear_bias: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    logits_dtype: torch.dtype,
    **choice: Unpack[ExpertChoice],
) -> tuple[Tensor, Tensor]:
    """topk_route of the logits x @ weight.T + linear_bias, which are rounded to logits_dtype. x [T,
    H], weight [E, H], linear_bias [E] of one dtype; the rest as topk_route. logits_dtype is that of
    x, or fp32 for models that cast x and weight to fp32 (GLM-4.5, DeepSeek-V3).
    """
    added = None if linear_bias is None else linear_bias.to(logits_dtype)
    logits = linear.reference(x.to(logits_dtype), weight.to(logits_dtype), added)
    return topk_route.reference(logits, bias, **choice)
