"""Replace a router by one op: the choice of experts, and the weights of the chosen ones.

    logits > to fp32 > softmax (or sigmoid) > topk > weights / sum > * scale > cast
                                               +---> ids
 =>
    topk_route(logits)

Variants: a bias that only chooses, experts of the best groups only, a softmax over the chosen
logits. The pattern of a router is made of the steps that are found behind its topk.
"""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node

from atomc import ops
from atomc.graph.canonical import Call, call, readers, value
from atomc.passes.typed_aten import to_copy
from atomc.rewriting.example import Example, ExampleValue, OneOf, tensor_example
from atomc.rewriting.matching.pattern import Index
from atomc.rewriting.rewrite import Case, Rewrite

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_SCORES = {"_softmax": "softmax", "sigmoid": "sigmoid", "sqrt": "sqrt_softplus"}
# What happens to weights, in the order of the op.
_STEPS = ("_softmax", "div", "mul", "cast")
_GROUP_SCORES = {"max": "max", "topk": "top2"}


class RouterForm(NamedTuple):
    """What a router does; see the op.

    biased    a bias takes part in the choice
    gathered  the weights are gathered by the ids, instead of what topk returns
    weighed   the steps from the chosen scores to the weights
    dtype     of the logits that are chosen from, which is that of a softmax over the chosen ones
    """

    score: str
    biased: bool
    groups: int
    topk_groups: int
    group_score: str
    gathered: bool
    weighed: tuple[str, ...]
    dtype: torch.dtype


def _scores(logits: Tensor, router: RouterForm) -> Tensor:
    if router.dtype != torch.float32:  # a softmax over the chosen ones, in 16 bits
        return logits
    logits = logits.to(torch.float32)
    if router.score == "softmax":
        return logits.softmax(-1)
    if router.score == "sigmoid":
        return logits.sigmoid()
    return F.softplus(logits).sqrt() if router.score == "sqrt_softplus" else logits


def _hide_other_groups(choice: Tensor, router: RouterForm) -> Tensor:
    experts = choice.shape[-1]
    grouped = choice.view(-1, router.groups, experts // router.groups)
    if router.group_score == "top2":
        best = grouped.topk(2, -1).values.sum(-1)
    else:
        best = grouped.max(-1).values
    best_ids = best.topk(router.topk_groups, -1, sorted=False).indices
    is_best = torch.zeros_like(best).scatter(1, best_ids, 1)
    mask = is_best.unsqueeze(-1).expand(-1, router.groups, experts // router.groups)
    # Scores of a softmax are positive, so that 0 is below all of them; with a bias they are not.
    outside = 0.0 if router.score == "softmax" and not router.biased else float("-inf")
    return choice.masked_fill(~mask.reshape(-1, experts).bool(), outside)


def _pattern(
    logits: Tensor,
    bias: Tensor | None,
    router: RouterForm,
    k: int,
    in_order: bool,
    eps: float = 0.0,
    min_sum: float = 0.0,
    scale: float = 1.0,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    scores = _scores(logits, router)
    choice = scores if bias is None else scores + bias
    if router.groups:
        choice = _hide_other_groups(choice, router)
    weights, ids = choice.topk(k, -1, sorted=in_order)
    if router.gathered:
        weights = scores.gather(1, ids)
    for step in router.weighed:
        if step == "_softmax":
            weights = weights.softmax(-1)
        elif step == "sum":
            weights = weights / weights.sum(-1, keepdim=True)
        elif step == "sum + eps":
            weights = weights / (weights.sum(-1, keepdim=True) + eps)
        elif step == "clamped sum":
            weights = weights / weights.sum(-1, keepdim=True).clamp(min=min_sum)
        elif step == "mul":
            weights = weights * scale
        elif step == "cast":
            weights = weights.to(dtype)
    return weights, ids


def _replacement(
    logits: Tensor,
    bias: Tensor | None,
    router: RouterForm,
    k: int,
    in_order: bool,
    eps: float = 0.0,
    min_sum: float = 0.0,
    scale: float = 1.0,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    routed = ops.topk_route(
        logits,
        bias,
        k=k,
        score=router.score,
        groups=max(router.groups, 1),
        topk_groups=router.topk_groups,
        group_score=router.group_score,
        renormalize=any("sum" in step for step in router.weighed),
        eps=eps,
        min_sum=min_sum,
        scale=scale,
        dtype=dtype if "cast" in router.weighed else router.dtype,
        in_order=in_order,
    )
    return routed[0], to_copy(routed[1], dtype=torch.int64)


def _example(router: RouterForm) -> Example:
    experts = 7 * (router.groups if router.groups > 1 else 3)
    logits = _FLOATS if router.dtype == torch.float32 else (router.dtype,)
    example: Example = {
        "logits": tensor_example(5, experts, dtype=OneOf(*logits)),
        "bias": tensor_example(experts, dtype=OneOf(*reversed(_FLOATS))) if router.biased else None,
        "router": router,
        "k": 3,
        "in_order": OneOf(True, False),
    }
    steps: dict[str, tuple[str, ExampleValue]] = {
        "sum + eps": ("eps", 1e-20),
        "clamped sum": ("min_sum", 1e-12),
        "mul": ("scale", 2.5),
        "cast": ("dtype", OneOf(*_FLOATS)),
    }
    captured = dict(steps[step] for step in router.weighed if step in steps)
    return {**example, **captured}


def _attrs(logits: Tensor, router: RouterForm, **_: object) -> dict[str, str | int]:
    groups = {"groups": router.groups} if router.groups > 1 else {}
    return {"score": router.score, "experts": logits.shape[-1], **groups}


@cache
def _case(router: RouterForm) -> Case:
    return Case(router.score, {"router": router})


def _cases(index: Index) -> Sequence[Case]:
    """A case for every router of the graph, and for what remains of it without its last steps."""
    routers = dict.fromkeys(router for node in index["topk"] if (router := _router(node)))
    return [
        _case(router._replace(weighed=router.weighed[:count]))
        for router in routers
        for count in range(len(router.weighed), -1, -1)
        if count or router.score != "softmax_of_chosen"
    ]


def _router(topk: Node) -> RouterForm | None:
    """The router that chooses with this topk, as far as it looks like one."""
    [choice] = call(topk).operands
    values, ids = (_part(topk, i) for i in (0, 1))
    if value(choice).dim() != 2 or ids is None or _reads(ids, "scatter"):
        return None  # among groups
    groups, topk_groups, group_score, choice = _groups(choice)
    biased = call(choice).op == "add"
    gather = _reads(ids, "gather")
    weighed = _steps(gather or values)
    score, dtype = _score(choice), torch.float32
    if score is None:
        score, dtype = "softmax_of_chosen", value(choice).dtype
        biased = biased and gather is not None  # else it is the bias of the product
        if "_softmax" not in weighed:
            return None
        if dtype != torch.float32:
            weighed = weighed[:1]  # the op rounds to 16 bits only once
    return RouterForm(
        score,
        biased,
        groups,
        topk_groups,
        group_score,
        gather is not None or biased,  # what topk returns contains the bias
        weighed,
        dtype,
    )


def _score(choice: Node) -> str | None:
    """What the scores are, a few nodes before the choice at most."""
    for _ in range(3):
        here = call(choice)
        if here.op in _SCORES:
            return _SCORES[here.op]
        if not here.operands:
            break
        of_scores = [operand for operand in here.operands if call(operand).op in _SCORES]
        choice = (of_scores or here.operands)[0]
    return None


def _groups(choice: Node) -> tuple[int, int, str, Node]:
    """The number of groups and how many of them are chosen, what scores them, and the scores of
    all experts; no groups if the choice is among all.
    """
    if call(choice).op != "masked_fill":
        return 0, 1, "max", choice
    scores, mask = call(choice).operands
    for grouped in scores.users:
        for reader in grouped.users:
            if value(grouped).dim() == 3 and call(reader).op in _GROUP_SCORES:
                count = _nearest_upstream(mask, "topk")
                count_of_best = call(count).attrs["k"] if count is not None else 1
                assert isinstance(count_of_best, int)
                return (
                    value(grouped).shape[1],
                    count_of_best,
                    _GROUP_SCORES[call(reader).op],
                    scores,
                )
    return 0, 1, "max", choice


def _nearest_upstream(node: Node, op: str, depth: int = 10) -> Node | None:
    """The nearest node upstream that is such an op, along the last operands."""
    while depth and call(node).op != op and call(node).operands:
        node, depth = call(node).operands[-1], depth - 1
    return node if call(node).op == op else None


def _steps(weights: Node | None) -> tuple[str, ...]:
    """What happens to the weights of the chosen experts, as far as it is in the order of the op."""
    steps: list[str] = []
    while weights is not None:
        following = [user for user in readers(weights) if call(user).op in _STEPS]
        if len(following) != 1:
            break
        [weights] = following
        here = call(weights)
        if any(_STEPS.index(here.op) <= _STEPS.index(_op_of(step)) for step in steps):
            break
        steps.append(_divisor(here) if here.op == "div" else here.op)
    return tuple(steps)


def _divisor(div: Call) -> str:
    return {"add": "sum + eps", "clamp": "clamped sum"}.get(call(div.operands[-1]).op, "sum")


def _op_of(step: str) -> str:
    return "div" if "sum" in step else step


def _part(node: Node, i: int) -> Node | None:
    return next((user for user in node.users if call(user).attrs.get("index") == i), None)


def _reads(node: Node, op: str) -> Node | None:
    """A reader of a node that is such an op."""
    return next((user for user in node.users if call(user).op == op), None)


TOPK_ROUTE = Rewrite(
    "topk_route",
    _pattern,
    _replacement,
    _example,
    attrs=_attrs,
    needs={"aten::topk": {}},
    cases=(),
    cases_in=_cases,
)
