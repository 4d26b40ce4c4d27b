"""Glue moves behind the kernels that do not read it, to its first reader."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from atomc.compiler.sink_pointwise import sink_pointwise
from atomc.graph.node_record import NodeRecord, record_of, set_record

X = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))


def sunk(
    function: Callable[..., Any], *inputs: Tensor, mode: Literal["fake", "symbolic"] = "fake"
) -> tuple[list[str], GraphModule]:
    """The ops of a function in their order, where each cos is a kernel, and its graph. atan2 stands
    for a lowered op that writes, and hypot for one that runs as PyTorch.
    """
    gm = make_fx(function, tracing_mode=mode)(*inputs)
    for node in gm.graph.nodes:
        name = getattr(node.target, "__name__", "").partition(".")[0]
        if name in ("cos", "atan2"):
            set_record(node, NodeRecord(kernel="triton"))
        if name in ("atan2", "hypot"):
            set_record(node, replace(record_of(node), op="kv_write"))
            node.args, node.kwargs = (), dict(zip(("k", "k_cache"), node.args, strict=True))
    sink_pointwise(gm.graph)
    gm.graph.lint()
    gm.recompile()
    calls = [node for node in gm.graph.nodes if node.op == "call_function"]
    return [node.target.__name__.partition(".")[0] for node in calls], gm


@pytest.mark.parametrize("mode", ["fake", "symbolic"])
def test_a_chain_moves_to_its_reader_behind_the_kernels(
    mode: Literal["fake", "symbolic"],
) -> None:
    def function(x: Tensor) -> Tensor:
        gate = torch.sigmoid(x[:, :1]).neg()
        return gate * x.cos().cos()

    order, gm = sunk(function, X, mode=mode)
    computed = [name for name in order if name not in ("sym_size", "slice")]
    assert computed == ["cos", "cos", "sigmoid", "neg", "mul"]
    torch.testing.assert_close(gm(X), function(X))


def test_what_several_moved_readers_share_stays_before_all_of_them() -> None:
    def function(x: Tensor) -> Tensor:
        shared = x[:, :1].neg()
        return (shared.exp() * shared.sin()) * x.cos() + shared.sigmoid()

    order, gm = sunk(function, X)
    assert order[0] == "cos" and order.index("neg") < order.index("exp") < order.index("mul")
    torch.testing.assert_close(gm(X), function(X))


def test_what_a_kernel_reads_first_stays() -> None:
    """Between two kernels it would be a piece of its own."""

    def function(x: Tensor) -> Tensor:
        gate = torch.sigmoid(x)
        return x.cos() * gate.cos() * gate

    assert sunk(function, X)[0] == ["sigmoid", "cos", "cos", "mul", "mul"]


def test_what_no_kernel_separates_stays() -> None:
    def function(x: Tensor) -> Tensor:
        first, second = torch.sigmoid(x), x.neg()
        return (first * second).cos()

    assert sunk(function, X)[0] == ["sigmoid", "neg", "mul", "cos"]


def test_what_reads_a_tensor_that_is_written_stays() -> None:
    def function(x: Tensor, state: Tensor) -> Tensor:
        gate = torch.sigmoid(state[:, 1:])
        new = x.cos()
        state.copy_(new)
        return gate * new[:, 1:]

    order, gm = sunk(function, X, X.clone())
    assert order.index("sigmoid") < order.index("cos")
    state = X.clone()
    torch.testing.assert_close(gm(X, state), torch.sigmoid(X[:, 1:]) * X.cos()[:, 1:])


def test_what_reads_a_tensor_that_a_lowered_op_may_write_stays() -> None:
    def function(x: Tensor, state: Tensor) -> Tensor:
        gate = torch.sigmoid(state[:, 1:])
        return gate * torch.atan2(x, state)[:, 1:]

    assert sunk(function, X, X.clone())[0] == ["slice", "sigmoid", "atan2", "slice", "mul"]


def test_an_op_that_writes_stays() -> None:
    def function(x: Tensor, state: Tensor) -> Tensor:
        return torch.hypot(x, state) * x.cos()

    assert sunk(function, X, X.clone())[0] == ["hypot", "cos", "mul"]


def test_random_numbers_are_drawn_in_their_order() -> None:
    def function(x: Tensor) -> Tensor:
        noise = torch.rand_like(x)
        return noise * x.cos()

    assert sunk(function, X)[0] == ["rand_like", "cos", "mul"]


def test_what_would_keep_more_memory_than_its_reader_makes_stays() -> None:
    def function(x: Tensor, small: Tensor) -> Tensor:
        wide = torch.cat([x, x, x], 1)
        return wide.sum(1) * small.cos()

    order, _ = sunk(function, X, X[:, 0].clone())
    assert order == ["cat", "sum", "cos", "mul"]


def test_what_keeps_less_moves() -> None:
    def function(x: Tensor, weight: Tensor) -> Tensor:
        thin = x @ weight
        return torch.sigmoid(thin[:, 0:1]) * x.cos()

    order, _ = sunk(function, X, torch.randn(8, 3))
    assert order == ["mm", "slice", "cos", "sigmoid", "mul"]
