"""Experts of two ranks by MORI's and AITER's kernels, which selection composes: each rank gets for
its tokens what the op of all experts means.
"""

from typing import Any

import mori_ranks
import pytest
import stand_ins
import torch
from mori_ranks import CASES, NONE, RANKS, Case, operands
from tiny_experts import sqnr
from torch import Tensor, multiprocessing

pytestmark = pytest.mark.xdist_group("mori_ranks")


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank saw."""
    folder = tmp_path_factory.mktemp("ranks")
    context = multiprocessing.get_context("spawn")
    ranks = [
        context.Process(target=mori_ranks.run, args=(rank, folder), daemon=True)
        for rank in range(RANKS)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(timeout=120)
        process.kill()  # if it still waits for the other one
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(RANKS)]


def expected(case: Case, rank: int) -> Tensor:
    """By the op, on one process."""
    values = operands(case)
    parameters = {
        name: values[name] for name in ("w13", "w13_scale", "w2", "w2_scale") if name in values
    }
    tokens_of_rank = slice(rank * case.tokens, (rank + 1) * case.tokens)
    x, ids, weights = (values[name][tokens_of_rank] for name in ("x", "ids", "weights"))
    weights = weights.masked_fill(case.owners[ids.long()] == NONE, 0.0)
    return mori_ranks.experts(case.scheme, x, ids, weights, **parameters)


def assert_right(case: Case, rank: int, out: Tensor) -> None:
    reference = expected(case, rank)
    assert (out.shape, out.dtype) == (reference.shape, reference.dtype)
    if len(out):
        error = (out.float() - reference.float()).square().mean().sqrt()
        assert error <= 1e-2 * reference.float().square().mean().sqrt()


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("rank", range(RANKS))
def test_tokens_travel_by_mori_to_aiters_experts(
    case: Case, rank: int, seen: list[dict[str, Any]]
) -> None:
    assert not isinstance(seen[rank][str(case)], str), seen[rank][str(case)]
    out, served = seen[rank][str(case)]
    assert (served["dispatch_tokens"], served["combine_tokens"]) == ("mori", "mori")
    assert_right(case, rank, out)


def test_ranks_that_want_other_providers_or_have_left_are_not_connected(
    seen: list[dict[str, Any]],
) -> None:
    assert [of_rank["unwanted"] for of_rank in seen] == [()] * RANKS
    assert [of_rank["left"] for of_rank in seen] == [(set(), ())] * RANKS


@pytest.mark.parametrize("rank", range(RANKS))
def test_without_the_library_on_one_rank_all_ranks_gather(
    rank: int, seen: list[dict[str, Any]]
) -> None:
    assert seen[rank]["why not"] == "not installed"
    assert not isinstance(seen[rank]["without"], str), seen[rank]["without"]
    out, served = seen[rank]["without"]
    assert (served["dispatch_tokens"], served["combine_tokens"]) == ("inline", "inline")
    assert_right(CASES[1], rank, out)


FUNCTIONS = {
    None: {"aiter.fused_moe.fused_moe"},
    "fp8_per_token": {"aiter.fused_moe.fused_moe"},
    "fp8_block": {
        "aiter.fused_moe.moe_sorting",
        "aiter.ck_moe_stage1_fwd",
        "aiter.ck_moe_stage2_fwd",
    },
}


@pytest.mark.parametrize("scheme", FUNCTIONS)
def test_a_served_mixture_runs_in_mori_and_aiter_also_beside_a_rank_without_tokens(
    scheme: str | None, seen: list[dict[str, Any]]
) -> None:
    for of_rank in seen:
        assert not isinstance(of_rank[str(scheme)], str), of_rank[str(scheme)]
        _, served = of_rank[str(scheme)]
        assert (served["dispatch_tokens"], served["combine_tokens"]) == ("mori", "mori")
        assert FUNCTIONS[scheme] <= of_rank[f"called for {scheme}"]
    with stand_ins.installed("gfx950"):
        logits, _ = mori_ranks.served(scheme, None)
    assert sqnr(logits, seen[0][str(scheme)][0]) > (40 if scheme is None else 25)
