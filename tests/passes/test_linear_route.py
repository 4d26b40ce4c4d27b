"""The product of a router's logits and its choice are one op, where nothing else reads the logits."""

import pytest
import torch
import torch.nn.functional as F
from rewriting import explained, rewritten
from torch import Tensor

import atomc
from atomc import passes
from atomc.passes.fuse.linear_route import LINEAR_TOPK_ROUTE
from atomc.passes.recognize.route import TOPK_ROUTE
from atomc.report.report import Report
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


def test_it_is_off_unless_an_option_turns_it_on() -> None:
    report = explained(of_fp32, X, W, CHOOSES, tolerance=1e-6)
    assert report.matches["topk_route"] == 1 and not report.matches["linear_topk_route"]

    assert explained(of_fp32, X, W, CHOOSES, tolerance=1e-6, on=["linear_topk_route"]).matches[
        "linear_topk_route"
    ]


def test_the_report_of_a_compile_says_which_option_turns_it_on() -> None:
    def compiled(**passes: bool) -> Report:
        options = {"glue": "eager", "passes": passes}
        torch.compile(of_fp32, backend="atom", options=options)(X, W, CHOOSES)
        torch._dynamo.reset()
        return atomc.reports()[-1]

    report = compiled()
    said = "off by default; on with options={'passes': {'linear_topk_route': True}}"
    assert report.why("linear_topk_route") == f"linear_topk_route: {said}"
    assert "linear_topk_route" not in str(report.to_text())

    report = compiled(linear_topk_route=True)
    assert "fired at 1 site" in report.why("linear_topk_route")
    assert "the pass is off" in compiled(linear_topk_route=False).why("linear_topk_route")
