"""Calls of kernel functions with fake tensors, which name the kernels that a graph launches."""

from typing import Any

import torch
from torch.fx import Graph, GraphModule
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from atomc.compiler.kernels_ahead import _launch_all
from atomc.graph.node_record import NodeRecord, set_record
from atomc.torch_compat.core import FakeTensorMode
from atomc.torch_compat.tracing import new_unbacked_size


def test_sizes_that_depend_on_data_and_what_is_not_there_yet_stop_no_compile() -> None:
    launched: list[Any] = []

    def kernel(*args: torch.Tensor) -> torch.Tensor:
        launched.append([(tuple(x.shape), x.stride()) for x in args])
        return args[0]

    mode = FakeTensorMode(shape_env=ShapeEnv())
    with mode:
        size = new_unbacked_size(mode)
        of_data = torch.empty(size, 8)
    graph = Graph()
    rows, prepared = graph.placeholder("rows"), graph.placeholder("prepared")
    rows.meta["val"] = of_data
    wrong = graph.call_function(kernel, (prepared,))
    right = graph.call_function(kernel, (rows,))
    behind = graph.call_function(kernel, (right, rows))
    for node in (wrong, right, behind):
        set_record(node, NodeRecord(kernel="triton"))
    graph.output((wrong, behind))
    _launch_all([GraphModule({}, graph)])
    assert launched == [[((1, 8), (8, 1))], [((1, 8), (8, 1))] * 2]
