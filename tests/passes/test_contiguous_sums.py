"""Sums of rows with gaps, as an encoder's of patches, become contiguous where a norm reads them."""

import pytest
import torch
import torch.nn.functional as F
from rewriting import after_passes
from torch import Tensor

from atomc import passes

PASSES = [p for p in passes.PIPELINE if p.name in ("tidy", "contiguous_sums")]
CHANNELS_FIRST = torch.randn(2, 8, 5, generator=torch.Generator().manual_seed(0))
ROWS = torch.randn(5, 8, generator=torch.Generator().manual_seed(1))
WEIGHT = torch.linspace(-1, 1, 64, dtype=torch.float64).view(8, 8).float()


def norm(x: Tensor) -> Tensor:
    return F.layer_norm(x, (8,))


def changed(function, *inputs: Tensor, dynamic: bool = False) -> int:
    """How many sums of the function the pass changes; the numbers are eager's."""
    traced = after_passes(PASSES, function, *inputs, dynamic=dynamic)
    assert traced.error < 1e-6
    return sum(stage.changed for stage in traced.report.stages if stage.name == PASSES[-1].name)


def layers(x: Tensor, rows: Tensor) -> Tensor:
    x = x.exp().transpose(1, 2) + rows
    x = x + norm(x) @ WEIGHT
    return norm(x + norm(x) @ WEIGHT)


@pytest.mark.parametrize("dynamic", [False, True])
def test_the_first_sum_of_an_encoder_makes_the_later_ones_contiguous(dynamic: bool) -> None:
    assert changed(layers, CHANNELS_FIRST, ROWS, dynamic=dynamic) == 1


def test_a_sum_may_have_any_rank_and_order() -> None:
    assert changed(lambda x, r: norm(x[0].t() + r), CHANNELS_FIRST, ROWS) == 1
    assert (
        changed(lambda x, r: norm(r[:1, :1] + x.transpose(1, 2).exp()), CHANNELS_FIRST, ROWS) == 1
    )


def test_others_may_read_the_sum_too() -> None:
    assert (
        changed(
            lambda x, r: norm(y := x.exp().transpose(1, 2) + r).amax() + y.sin().amax(),
            CHANNELS_FIRST,
            ROWS,
        )
        == 1
    )


STAYS = {
    "no norm": lambda x, rows: (x.exp().transpose(1, 2) + rows).sum(-1),
    "a contiguous sum": lambda x, rows: norm(rows.expand(2, 5, 8).exp() + x.exp().transpose(1, 2)),
    "contiguous rows": lambda x, rows: norm(x.exp().transpose(1, 2).contiguous() + rows),
    "both have gaps": lambda x, rows: norm((y := x.exp().transpose(1, 2)) + y.sin()),
    "a number": lambda x, rows: norm(rows + x.sum()),
    "columns of one element": lambda x, rows: F.layer_norm(x.exp()[:, :1].mT + rows[:, :1], (1,)),
    "one row for all": lambda x, rows: norm(x[:1, :, :1].exp().transpose(1, 2) + rows),
    "the graph returns it": lambda x, rows: ((y := x.exp().transpose(1, 2) + rows), norm(y)),
    "a view needs its strides": lambda x, rows: (
        norm(y := x.exp().transpose(1, 2) + rows).sum() + y.transpose(1, 2).view(2, 40)
    ),
}


@pytest.mark.parametrize("name", STAYS)
def test_another_sum_stays(name: str) -> None:
    assert changed(STAYS[name], CHANNELS_FIRST, ROWS) == 0


@pytest.mark.parametrize("glue", ["eager", "inductor"])
def test_results_have_the_strides_of_eager(glue: str) -> None:
    torch._dynamo.reset()
    options = {"strict": True, "glue": glue}
    with torch.no_grad():
        for function in (layers, STAYS["the graph returns it"]):
            compiled = torch.compile(function, backend="atom", options=options)
            results = compiled(CHANNELS_FIRST, ROWS), function(CHANNELS_FIRST, ROWS)
            results = [x if isinstance(x, tuple) else (x,) for x in results]
            for here, eager in zip(*results, strict=True):
                torch.testing.assert_close(here, eager)
                assert here.stride() == eager.stride()
