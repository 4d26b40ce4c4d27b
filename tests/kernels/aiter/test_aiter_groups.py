"""Ranks on AMD's GPUs join AITER's groups, so that its collectives are not refused, and capture in its
context, so that it reads tensors where they are.
"""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import group_ranks
import pytest
import torch
from group_ranks import EPS, SCHEMES, operands
from test_kernels import assert_neighbours, is_code
from torch import Tensor, multiprocessing

from atomc import ops
from atomc.kernels.aiter.collective import groups


def check_sums(results: dict[str, Any], rank: int, stage: list[int]) -> None:
    parts = [operands(other)["x"].float() for other in stage]
    beside = torch.cat(parts, -1).bfloat16()
    assert torch.equal(results["collective.all_gather"], beside)
    total = torch.stack(parts).sum(0).bfloat16().float()
    torch.testing.assert_close(results["collective.all_reduce"].float(), total)
    tensors = operands(rank)
    wide: dict[str, Tensor] = {name: tensors[name].float() for name in ("residual", "weight")}
    norm = {**wide, "eps": EPS, "style": "before"}
    normed = ops.add_rms_norm.reference(total, **norm)
    compared = [(results["collective.allreduce_add_rms_norm"], normed)]
    for scheme in SCHEMES:
        expected = ops.add_rms_norm_quant.reference(
            total, **norm, scheme=scheme, column_major=True, keep=True
        )
        name = f"collective_quant.allreduce_add_rms_norm_quant, {scheme}"
        compared.append((results[name], expected))
    for got, expected in compared:
        for result, reference in zip(got, expected, strict=True):
            assert result.stride() == reference.stride()
            if is_code(result):
                assert_neighbours(result, reference, moved=0.05)
            else:
                expected = reference.to(result.dtype)
                torch.testing.assert_close(result, expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    ("tp", "pp"), [(2, 1), pytest.param(2, 2, marks=pytest.mark.rotating)], ids=str
)
def test_sums_of_a_stage_are_aiters(tp: int, pp: int, tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    ranks = [
        context.Process(target=group_ranks.run, args=(rank, tp, pp, tmp_path), daemon=True)
        for rank in range(tp * pp)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(timeout=120)
        process.kill()  # if it still waits for another one
    for rank in range(tp * pp):
        stage = [*range(rank // tp * tp, rank // tp * tp + tp)]
        seen: list[Any] = torch.load(tmp_path / f"{rank}.pt", weights_only=False)
        assert len(seen) == 3 and not any(isinstance(joined, str) for joined in seen), seen
        assert [joined[-1] for joined in seen] == [{"tp", "world"}, {"tp", "world"}, set()]
        for place, results, captures, _ in seen[:2]:
            assert (place.tp.rank, place.tp.size) == (rank % tp, tp)
            assert (place.stage.index if place.stage else 0) == rank // tp
            assert place.capturing is groups.capturing
            check_sums(results, rank, stage)
            # A warm-up is no capture: AITER would take its sums for zeros in this context.
            warm_up, capture, whole = captures["results"]
            for sums in (warm_up, capture):
                assert torch.equal(sums["all_reduce"], results["collective.all_reduce"])
            check_sums(whole, rank, stage)
            assert captures["said"] == "this cannot be captured"
            assert captures["registered"] == [1, 1, 3 + len(SCHEMES)]
        assert seen[2][0].capturing is nullcontext
