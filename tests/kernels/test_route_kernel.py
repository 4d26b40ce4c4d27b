"""The Triton kernel of routers beyond the table of tests/kernels/test_kernels.py: ties, its limits."""

import importlib

import pytest
import torch
import torch.nn.functional as F
from refusals import refusal_text
from torch.testing import assert_close

from atomc import kernels, ops
from atomc.ops.op import refusal
from atomc.platform import Platform

pytest.importorskip("triton")
assert kernels.load("triton") is None
route = importlib.import_module("atomc.kernels.triton.experts.route")  # only where there is Triton

# Where it is a CPU, Triton's interpreter runs.
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def test_equal_scores_are_taken_in_the_order_of_their_experts() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 3.0, 2.0, 3.0, 2.0]], device=DEVICE)
    weights, ids = route.topk_route(logits, k=5, renormalize=True)
    assert ids.tolist() == [[1, 3, 5, 2, 4]]
    assert weights[0, 0] == weights[0, 2] > weights[0, 3] == weights[0, 4]


def test_equal_groups_are_taken_in_their_order() -> None:
    logits = torch.tensor([[0.0, 1.0, 1.0, 0.0, 1.0, 0.0]], device=DEVICE)
    _, ids = route.topk_route(logits, k=4, groups=3, topk_groups=2)
    assert ids.tolist() == [[1, 2, 0, 3]]


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrt_softplus", "softmax_of_chosen"])
def test_the_best_32_of_1000_experts_are_found_in_their_order(score: str) -> None:
    logits = (torch.randperm(3000).view(3, 1000).to(DEVICE) / 300) - 4
    weights, ids = route.topk_route(logits, k=32, score=score, dtype=torch.float32)
    expected, expected_ids = ops.topk_route.reference(logits, k=32, score=score)
    assert torch.equal(ids, expected_ids)
    assert_close(weights, expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_a_logit_that_is_not_a_number_leaves_ids_that_are_experts_and_differ(score: str) -> None:
    logits = torch.randn(2, 12, device=DEVICE)
    logits[0, 5] = float("nan")
    logits[1, :10] = float("-inf")
    _, ids = route.topk_route(logits, k=4, score=score)
    assert ((ids >= 0) & (ids < 12)).all()
    assert all(len(set(row)) == 4 for row in ids.tolist())


def test_scores_of_very_small_and_very_large_logits_keep_their_precision() -> None:
    logits = torch.tensor([[-40.0, -15.0, 0.0, 15.0, 25.0, 80.0]], device=DEVICE)
    weights, _ = route.topk_route(logits, k=6, score="sqrt_softplus")
    expected, _ = ops.topk_route.reference(logits.double().float(), k=6, score="sqrt_softplus")
    assert_close(weights, expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("experts", "given", "sentence"),
    [
        (1025, {"k": 4}, "logits of 1025 exceed the limit of 1024"),
        (64, {"k": 33}, "choices of 33 exceed the limit of 32"),
        (64, {"k": 4, "groups": 7}, "64 experts are not 7 groups of one size"),
        (64, {"k": 4, "dtype": torch.float64}, "the result is torch.float64: written for"),
    ],
)
def test_what_it_does_not_route_is_refused(experts: int, given: dict, sentence: str) -> None:
    [kernel] = [kernel for kernel in ops.topk_route.kernels if kernel.provider == "triton"]
    arguments = {"logits": torch.zeros(2, experts), **given}
    assert sentence in refusal_text(kernel, Platform.named("h200"), arguments)


@pytest.mark.parametrize("tokens", [16, 17, 70])
@pytest.mark.parametrize("logits_dtype", [torch.bfloat16, torch.float32])
def test_routers_of_any_number_of_tokens_compute_their_logits(
    tokens: int, logits_dtype: torch.dtype
) -> None:
    [kernel] = [kernel for kernel in ops.linear_topk_route.kernels if kernel.provider == "triton"]
    # Sums of small integers are exact in any order, so that no choice depends on rounding.
    x, weight = (
        torch.randint(-2, 3, (rows, 65), device=DEVICE).bfloat16() for rows in (tokens, 21)
    )
    linear_bias = torch.arange(21, device=DEVICE).bfloat16() / 32
    given = {"logits_dtype": logits_dtype, "k": 3, "score": "softmax_of_chosen"}
    arguments = {"x": x, "weight": weight, "linear_bias": linear_bias, **given}
    assert tokens in kernel.tokens
    assert refusal(kernel, Platform.named("h200"), arguments) is None
    weights, ids = kernel.function(**arguments)
    logits = F.linear(x.float(), weight.float(), linear_bias.float()).to(logits_dtype).float()
    assert_close(logits.gather(1, ids.long()), logits.topk(3).values, rtol=0, atol=0)
    assert_close(weights, logits.topk(3).values.softmax(-1), rtol=1e-5, atol=1e-6)
