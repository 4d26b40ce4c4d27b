"""Ops of a user that write to their operands, in compiled graphs: called directly, not on copies."""

import pytest
import torch
from rewriting import after_passes, rewritten
from torch import Tensor

from atomc import passes
from atomc.passes.reinplace import reinplace
from atomc.rewriting.graph_pass import Pass

REINPLACE = Pass("reinplace", reinplace)


@torch.library.custom_op("tests_in_place::write", mutates_args=("base",))
def write(x: Tensor, base: Tensor, row: int) -> Tensor:
    base[row] += x
    return x + base.sum()


@torch.library.custom_op("tests_in_place::swap", mutates_args=("a", "b"))
def swap(a: Tensor, b: Tensor | None) -> None:
    if b is not None:
        old = a.clone()
        a.copy_(b)
        b.copy_(old + 1)


@torch.library.custom_op("tests_in_place::rows", mutates_args=("bases",))
def rows(x: Tensor, bases: list[Tensor]) -> tuple[Tensor, Tensor]:
    bases[0][0] += x
    return x + 1, x - 1


@torch.library.custom_op("tests_in_place::two", mutates_args=("base",))
def two(x: Tensor, base: Tensor) -> tuple[Tensor, Tensor]:
    base.add_(x)
    return x + base[0], x - base[0]


write.register_fake(lambda x, base, row: torch.empty_like(x))
rows.register_fake(lambda x, bases: (torch.empty_like(x), torch.empty_like(x)))
two.register_fake(lambda x, base: (torch.empty_like(x), torch.empty_like(x)))

X, BASE = torch.randn(3), torch.randn(4, 3)


def test_each_layer_writes_to_the_input_itself():
    def layers(x, base):
        return write(write(x, base, 0) * 2, base, 1)

    assert (
        rewritten(REINPLACE, layers, X, BASE, matches=2)
        == """\
%0 = write(x=x, base=base, row=0)
%1 = mul(%0, 2)
%2 = write(x=%1, base=base, row=1)
return %2"""
    )


def views(x, base):
    half = base[1:3]
    return write(x, half, 0) + write(x, base.view(2, 2, 3)[:, 1], 1) + half.sum()


def test_a_view_of_the_input_is_written_as_that_view():
    text = rewritten(REINPLACE, views, X, BASE, matches=2)
    assert "slice(base, 0, 1, 3)" in text
    assert "as_strided(base, [2, 3], [6, 1], 3)" in text


def test_two_inputs_and_an_absent_one_are_written_by_one_call():
    def both(a, b):
        swap(a, b)
        swap(b, None)
        return a + b

    text = rewritten(REINPLACE, both, BASE, torch.randn(4, 3), matches=3)
    assert text.count("swap(") == 2 and "copy_" not in text


def test_several_results_keep_their_numbers():
    def of_two(x, base):
        high, low = two(x, base)
        return high * 2 - low, base.sum()

    assert "functionalized" not in rewritten(REINPLACE, of_two, X, BASE)


def read_later(x, base):
    old = base.clone()
    return write(x, base, 0) + old.sum()


def reads_its_base(x, base):
    return write(base[0], base, 1)


def made_here(x, base):
    fresh = base * 2
    return write(x, fresh, 0) + fresh.sum()


def returned(x, base):
    return write(x, base, 0), base


def lists(x, base):
    return rows(x, [base])[0]


@pytest.mark.parametrize("function", [reads_its_base, made_here, lists])
def test_a_call_that_needs_a_copy_keeps_it(function):
    assert "functionalized" in rewritten(REINPLACE, function, X, BASE, matches=0)


@pytest.mark.parametrize("function", [read_later, returned, views])
def test_the_whole_pipeline_gives_the_numbers_of_eager(function):
    assert after_passes(passes.PIPELINE, function, X, BASE).error < 1e-6
