"""A rank that loads its part of a checkpoint holds little more than that part at any time."""

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from tiny_experts import random_model, stored, write
from tracked_bytes import TrackedBytes

from atomc.models import execute_plan
from atomc.models.loader import load
from atomc.parallel.group import TensorParallel

HALF = TensorParallel(1, 2, "ranks")
DIVIDED: dict[str, dict[str, Any]] = {
    "tensor parallel": {"tp": HALF},
    "experts by expert": {"tp": HALF, "ep": True},
    "only experts": {"experts": HALF},
}
# No tensor is as large as a tenth of a rank's part.
SIZES = {"num_hidden_layers": 8, "vocab_size": 256, "num_experts": 8}


class SameThread:
    """A ThreadPoolExecutor that runs jobs in the thread whose operations are tracked."""

    def __init__(self, threads: int) -> None:
        pass

    def __enter__(self) -> "SameThread":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def submit(self, job: Callable[..., Any], *given: Any) -> "Future[Any]":
        done: Future[Any] = Future()
        done.set_result(job(*given))
        return done

    def shutdown(self, **_: object) -> None:
        pass


@pytest.mark.parametrize("how", DIVIDED.values(), ids=DIVIDED)
def test_the_peak_of_a_rank_is_at_most_its_part_and_a_tenth(
    how: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(execute_plan, "ThreadPoolExecutor", SameThread)
    model = random_model("qwen3_moe", **SIZES)
    write(tmp_path, "qwen3_moe", stored(model), **SIZES)
    whole = sum(weight.nbytes for weight in model.parameters())
    tracked = TrackedBytes()
    with tracked:
        part = load(tmp_path, progress=False, **how)
    share = sum(weight.nbytes for weight in part.parameters())
    assert share < 0.6 * whole
    assert share <= tracked.peak - tracked.before <= 1.1 * share
