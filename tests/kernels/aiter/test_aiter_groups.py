"""Ranks on AMD's GPUs join AITER's groups, so that its collectives are not refused."""

from pathlib import Path
from typing import Any

import group_ranks
import pytest
import torch
from group_ranks import EPS, operands
from torch import multiprocessing

from atomc import ops


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
        assert [groups for *_, groups in seen] == [{"tp", "world"}, {"tp", "world"}, set()]
        for place, results, _ in seen[:2]:
            assert (place.tp.rank, place.tp.size) == (rank % tp, tp)
            assert (place.stage.index if place.stage else 0) == rank // tp
            total = torch.stack([operands(other)["x"].float() for other in stage]).sum(0)
            torch.testing.assert_close(results["all_reduce"], total.bfloat16())
            tensors = operands(rank)
            wide = {name: tensors[name].float() for name in ("residual", "weight")}
            expected = ops.add_rms_norm.reference(total, **wide, eps=EPS, style="before")
            for result, reference in zip(results["allreduce_add_rms_norm"], expected, strict=True):
                torch.testing.assert_close(result, reference.bfloat16(), rtol=1e-2, atol=1e-2)
