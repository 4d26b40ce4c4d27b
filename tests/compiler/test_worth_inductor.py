"""Inductor is started for enough ops between kernels, on a GPU also for a few that move much."""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from atomc.compiler.worth_inductor import FEW_OPS, left_for_glue, unfused_share, why_eager
from atomc.graph.node_record import NodeRecord, set_record
from atomc.platform import Platform

X = torch.randn(16, 16, generator=torch.Generator().manual_seed(0))
CPU, H200 = map(Platform.named, ("cpu-zen4", "h200"))


def lowered(function: Callable[..., Any], mode: str = "fake") -> GraphModule:
    """The graph of a function of X, where each cos is a kernel and each hypot a reference."""
    gm = make_fx(function, tracing_mode=mode)(X)
    for node in gm.graph.nodes:
        name = getattr(node.target, "__name__", "")
        records = {
            "cos.default": NodeRecord(kernel="triton"),
            "hypot.default": NodeRecord(op="f"),
        }
        set_record(node, records.get(name, NodeRecord()))
    return gm


def test_only_ops_that_inductor_can_fuse_with_others_between_kernels_count() -> None:
    alone = lowered(lambda x: (((x.cos() + 1).cos() + 2).view(4, 64).t().cos() + 3).cos())
    assert left_for_glue(alone) == 0
    assert left_for_glue(lowered(lambda x: ((x.cos() + 1).view(-1) * 2).cos() + 3)) == 2
    assert left_for_glue(lowered(lambda x: x.cos().hypot(x).cos())) == 4
    assert left_for_glue(lowered(lambda x: (x + 1) * 2)) == sys.maxsize


@pytest.mark.parametrize("mode", ["fake", "symbolic"])
def test_the_share_counts_what_is_written_and_read_between_two_ops(mode: str) -> None:
    # Each of three nodes reads and writes X; one of the tensors stays between two ops.
    share = unfused_share(lowered(lambda x: (x.cos() + 1).t() * 2, mode))
    assert share == pytest.approx(2 / 6)
    assert unfused_share(lowered(lambda x: (x.cos() + 1).t().contiguous().cos(), mode)) == (
        pytest.approx(2 / 8)
    )
    # Of 4 and 2 bytes: cos 4 + 4, the cast 4 + 2, both others 2 + 2; two of 2 stay between.
    halves = unfused_share(lowered(lambda x: (x.cos().half() + 1) * 2, mode))
    assert halves == pytest.approx(2 * 4 / 22)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x + 1).cos() * 2,
        lambda x: x.cos() @ x + 1,
        lambda x: (x.cos() + 1) @ x,
        lambda x: torch.conv1d(x.cos()[None], x[:, :, None]) + 1,
        lambda x: x.cos().view(-1).t().view(16, 16).t() + 1,
    ],
    ids=["a kernel between", "behind a product", "before a product", "a convolution", "views"],
)
def test_what_inductor_cannot_fuse_is_no_share(function: Callable[[Tensor], Tensor]) -> None:
    assert unfused_share(lowered(function)) == 0


def test_a_gpu_starts_inductor_for_a_few_ops_that_move_much() -> None:
    much = lowered(lambda x: (x.cos() + 1) * 2)
    assert why_eager(much, H200) is None
    assert why_eager(much, CPU) == "2 ops between kernels are too few to start Inductor for"


def test_a_gpu_runs_a_few_ops_that_move_little_eagerly() -> None:
    little = lowered(lambda x: ((x.cos()[:1] + 1) * 2, x.cos(), x @ x.cos()))
    assert 0 < unfused_share(little) < 0.02
    for platform in (CPU, H200):
        assert why_eager(little, platform)


def test_many_ops_start_inductor_on_each_platform() -> None:
    def chain(x: Tensor, ops: int) -> Tensor:
        x = x.cos()[0]
        for _ in range(ops):
            x = x + 1
        return x

    many, few = (lowered(partial(chain, ops=n)) for n in (FEW_OPS + 1, FEW_OPS))
    assert why_eager(many, CPU) is None and why_eager(many, H200) is None
    assert why_eager(few, CPU)
