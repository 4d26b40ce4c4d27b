"""The product of a router's logits and its choice are one op, where nothing else reads the logits."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rewriting import explained, rewritten
from torch import Tensor

from atomc import passes
from atomc.compiler.pipeline import register_pass
from atomc.passes.fuse.linear_route import LINEAR_TOPK_ROUTE
from atomc.passes.recognize.route import TOPK_ROUTE
from atomc.rewriting.graph_pass import rewriting

T, E, K, D = 6, 8, 3, 16
X, W = torch.randn(T, D).bfloat16(), torch.randn(E, D).bfloat16()
BIAS, CHOOSES = torch.randn(E).bfloat16(), torch.randn(E)
BOTH = [passes.PIPELINE[0], rewriting(TOPK_ROUTE), rewriting(LINEAR_TOPK_ROUTE)]


def chosen(logits: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    scores = logits.float().sigmoid()
    ids = (scores if bias is None else scores + bias).topk(K, -1).indices
    weights = scores.gather(1, ids)
    return weights / weights.sum(-1, keepdim=True), ids


def of_fp32(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    return chosen(F.linear(x.float(), weight.float()), bias)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_logits_in_the_dtype_of_the_model_are_computed_by_the_router(dtype: torch.dtype) -> None:
    def function(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        top, ids = F.linear(x, weight, bias).topk(K, -1)
        return top.softmax(-1), ids

    text = rewritten(BOTH, function, *(each.to(dtype) for each in (X, W, BIAS)))
    assert f"logits_dtype={str(dtype)[6:]}" in text and "softmax_of_chosen" in text


@pytest.mark.parametrize("dynamic", [False, True])
def test_casts_to_fp32_before_the_product_belong_to_the_router(dynamic: bool) -> None:
    text = rewritten(BOTH, of_fp32, X, W, CHOOSES, dynamic=dynamic, tolerance=1e-6)
    assert "logits_dtype=float32" in text and "_to_copy(x" not in text


# Function, inputs, kind, expected and found of its near miss.
NEAR: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...], str, str, str]] = {
    "logits that are returned": (
        lambda x, w: (*chosen(logits := F.linear(x, w)), logits),
        (X, W),
        "extra user",
        "no other reader of linear",
        "the graph returns it",
    ),
    "logits that are scaled": (
        lambda x, w: chosen(F.linear(x, w) * 0.5),
        (X, W),
        "extra op",
        "topk_route reading linear.* directly",
        "^mul.* in between",
    ),
    "logits of two dimensions of tokens": (
        lambda x, w: chosen(F.linear(x.view(2, 3, D), w).view(-1, E)),
        (X, W),
        "extra op",
        "topk_route reading linear.* directly",
        "^view.* in between",
    ),
    "logits that are rounded": (
        lambda x, w: chosen(F.linear(x.float(), w.float()).bfloat16()),
        (X, W),
        "extra op",
        "topk_route reading linear.* directly",
        "^cast.* in between",
    ),
}


@pytest.mark.parametrize("name", NEAR)
def test_what_is_between_the_product_and_the_choice_is_named(name: str) -> None:
    function, inputs, kind, expected, found = NEAR[name]
    with register_pass(LINEAR_TOPK_ROUTE, before="merge_qkv"):
        report = explained(function, *inputs, tolerance=1e-6)
    assert (report.matches["topk_route"], report.matches["linear_topk_route"]) == (1, 0)
    first = report.misses("linear_topk_route")[0]
    assert re.search(kind, first.kind) and re.search(expected, first.expected), first
    assert re.search(found, first.found), first
