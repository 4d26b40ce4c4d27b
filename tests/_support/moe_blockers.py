"""What keeps routers and experts from being recognized: rows of the table in test_blockers.py."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# T tokens, E experts, K of each token, D width of the model, I width of an expert.
T, E, K, D, I = 6, 8, 3, 16, 24  # noqa: E741
Change = Callable[[Tensor], Tensor]


def rand(*shape: int) -> Tensor:
    return torch.randn(*shape).to(torch.bfloat16)


def same(x: Tensor) -> Tensor:
    return x


def doubled_in_place(x: Tensor) -> Tensor:
    return x.mul_(2)


def to_meta(x: Tensor) -> Tensor:
    return x.to("meta")


LOGITS = (rand(T, E),)
ROUTER = rand(T, D), rand(E, D)
EXPERTS = rand(T, D), torch.rand(T, E).topk(K).indices, rand(T, K), rand(E, 2 * I, D), rand(E, D, I)


def routed(
    scores: Change = lambda logits: logits.softmax(-1, dtype=torch.float32),
    dim: int = -1,
    before: Change = same,
    read: bool = False,
) -> Callable[..., Any]:
    def function(logits: Tensor) -> Any:
        scored = scores(logits)
        chosen, ids = before(scored).topk(K, dim)
        weights = chosen / chosen.sum(-1, keepdim=True)
        return weights.to(logits.dtype), ids, *([scored] if read else [])

    return function


def experts(
    other_ids: Change = same,
    between: Change = same,
    act: Change = F.silu,
    after: Change = same,
    summed: int = 1,
    sum_dtype: torch.dtype | None = torch.float32,
    read: bool = False,
    swapped: bool = False,
) -> Callable[..., Any]:
    def function(x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w2: Tensor) -> Any:
        h = torch.einsum("tkih,th->tki", w13[ids], x)
        gate, up = between(h).chunk(2, -1)
        gated = act(up) * gate if swapped else act(gate) * up
        y = torch.einsum("tkhi,tki->tkh", w2[other_ids(ids)], gated)
        out = (after(y) * after(weights).unsqueeze(-1)).sum(summed, dtype=sum_dtype).to(x.dtype)
        return (out, y.abs()) if read else out

    return function


def routed_linear(
    after: Change = same, before: Change = same, read: bool = False
) -> Callable[..., Any]:
    def function(x: Tensor, weight: Tensor) -> Any:
        logits = after(F.linear(before(x), before(weight)))
        return (*routed()(logits), *([logits] if read else []))

    return function


NO_EPS = "n/a: it has no eps"
READ_TOO = "(the graph returns it|also reads it)"
MOVED = r"^to\(dtype=.*, device=meta\).* in between"
# By blocker: function, inputs, kind, expected, found.
MOE_ROWS: dict[str, dict[str, Any]] = {
    "moe_experts": {
        "extra user": (experts(read=True), EXPERTS, "extra user", "no other reader of view", READ_TOO),
        "mutation": (
            experts(between=doubled_in_place), EXPERTS, "extra op", "view.* reading bmm directly",
            r"mul\(other=2\).* in between"),
        "view that changes meaning": (
            experts(between=lambda h: h.transpose(0, 1).reshape(h.shape)), EXPERTS, "extra op",
            "view.* reading bmm directly", "in between"),
        "device": (experts(after=to_meta), EXPERTS, "extra op", "mul reading view.* directly", MOVED),
        "eps differs": NO_EPS,
        "not the last dim": (
            experts(summed=0), EXPERTS, "attribute", r"sum with dim=\(-2,\)", r"^dim=\(-3,\)"),
        "dtype promotion": (
            experts(), (*EXPERTS[:2], EXPERTS[2].double(), *EXPERTS[3:]), "dtype",
            "`weights` in float32 or bfloat16", "float64"),
        "operand order": (
            experts(swapped=True), EXPERTS, "missing op", "silu after slice.*start=0", "reads it directly"),
        "missing cast": (
            experts(sum_dtype=None), EXPERTS, "attribute", "sum with dtype=float32", "dtype=None"),
    },
    "topk_route": {
        "extra user": (routed(read=True), LOGITS, "extra user", "no other reader of _softmax", READ_TOO),
        "mutation": (
            routed(before=doubled_in_place), LOGITS, "extra op", "topk reading _softmax.* directly",
            r"^mul\(other=2\).* in between"),
        "view that changes meaning": (
            routed(before=lambda scores: scores.view(T // 2, 2 * E)), LOGITS, "extra op",
            "topk reading _softmax.* directly", "^view.* in between"),
        "device": (routed(before=to_meta), LOGITS, "extra op", "topk reading _softmax.* directly", MOVED),
        "eps differs": "n/a: it has one eps",
        "not the last dim": (routed(dim=0), LOGITS, "attribute", "topk with dim=-1", "^dim=-2"),
        "dtype promotion": (
            routed(), (LOGITS[0].double(),), "dtype", "`logits` in bfloat16 or float16 or float32",
            "float64"),
        "operand order": "n/a: weights that are divided in another way are those of a router without",
        "missing cast": (
            routed(scores=lambda logits: logits.softmax(-1)), LOGITS, "missing cast",
            "a cast to float32", "used as it is, in bfloat16"),
    },
    "linear_topk_route": {
        "extra user": (
            routed_linear(read=True), ROUTER, "extra user", "no other reader of linear", "the graph returns it"),
        "mutation": (
            routed_linear(doubled_in_place), ROUTER, "extra op", "topk_route reading linear.* directly",
            r"^mul.* in between"),
        "view that changes meaning": (
            routed_linear(lambda logits: logits.view(T // 2, 2 * E)), ROUTER, "extra op",
            "topk_route reading linear.* directly", "^view.* in between"),
        "device": (
            routed_linear(to_meta), ROUTER, "extra op", "topk_route reading linear.* directly", MOVED),
        "eps differs": NO_EPS,
        "not the last dim": "n/a: such a choice is no topk_route",
        "dtype promotion": (
            routed_linear(Tensor.bfloat16, Tensor.float), ROUTER, "extra op",
            "topk_route reading linear.* directly", "^cast.* in between"),
        "operand order": "n/a: the operands of F.linear have one order",
        "missing cast": "n/a: F.linear takes operands of one dtype",
    },
}  # fmt: skip
