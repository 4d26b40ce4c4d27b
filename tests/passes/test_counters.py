"""Counters of layers are added to at once, behind all that reads them."""

import torch
from rewriting import rewritten
from torch import Tensor

from atomc.passes.merge.counters import counters
from atomc.passes.reinplace import reinplace
from atomc.rewriting.graph_pass import Pass

COUNTERS = [Pass("reinplace", reinplace), Pass("counters", counters, after=["reinplace"])]


def test_counters_are_added_to_at_once_behind_all_that_reads_them() -> None:
    def function(x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        y = x + a
        a.add_(1)
        y = y * b
        b.add_(1)
        c.add_(2)
        return y + 1

    numbers = [torch.tensor(n) for n in (3, 5, 7)]
    text = rewritten(COUNTERS, function, torch.ones(4), *numbers, matches=2)
    assert text.endswith("""\
_foreach_add_([a, b], 1)
%4 = add_(c, 2)
return %2""")


def test_a_counter_that_is_read_behind_the_addition_is_left_alone() -> None:
    def function(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        a.add_(1)
        b.add_(1)
        return x + a

    rewritten(COUNTERS, function, torch.ones(4), torch.tensor(3), torch.tensor(5), matches=1)


def test_tensors_and_floats_are_no_counters() -> None:
    def function(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        a.add_(1)
        b.add_(1)
        return x + 1

    rewritten(COUNTERS, function, torch.ones(4), torch.arange(4), torch.tensor(3.0), matches=0)
