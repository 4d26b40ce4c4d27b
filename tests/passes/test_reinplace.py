"""Inputs that a graph writes to are written in place, if nothing reads their old values later."""

import pytest
import torch
from rewriting import after_passes, rewritten
from torch import Tensor

from atomc import passes
from atomc.passes.reinplace import reinplace
from atomc.rewriting.graph_pass import Pass

REINPLACE = Pass("reinplace", reinplace)
INPUTS = torch.randn(4, 3), torch.randn(2, 3), torch.tensor([3, 1])


def test_rows_are_written_into_the_input() -> None:
    def write(cache: Tensor, rows: Tensor, at: Tensor) -> Tensor:
        cache.index_copy_(0, at, rows)
        return cache.sum(0)

    assert "index_copy_(cache, 0, at, rows)" in rewritten(REINPLACE, write, *INPUTS)


@pytest.mark.parametrize("part", [lambda x: x, lambda x: x[:2], lambda x: x.t()])
def test_old_values_that_are_read_later_are_the_old_ones(part) -> None:
    """The copy of old values is no op of the graph: what reads it may stand behind the write."""

    def write(cache: Tensor, rows: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        old = part(cache).clone()
        cache.index_copy_(0, at, rows)
        return old.sum() * 2, cache.sum(0)

    assert after_passes(passes.PIPELINE, write, *INPUTS).error < 1e-6
