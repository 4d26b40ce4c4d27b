"""The graphs of functions, as patterns are traced."""

import operator

import pytest
import torch

from atomc.graph.canonical import value
from atomc.graph.expressions import expression
from atomc.rewriting.example import tensor_example
from atomc.torch_compat.aten_graph import aten_graph

X = tensor_example(9, 4)
aten = torch.ops.aten


def traced(function, **arguments):
    return aten_graph(function, arguments, symbolic=True)


def targets(graph):
    return [node.target for node in graph.nodes if node.op == "call_function"]


def test_the_sizes_of_an_example_decide_conditions_without_guards():
    graph = traced(lambda x: x[: x.shape[1] // 2] if x.shape[0] > 2 * x.shape[1] else x + 1, x=X)
    (x,) = graph.find_nodes(op="placeholder")
    rows, columns = map(expression, value(x).shape)
    assert rows.is_Symbol and columns.is_Symbol and rows != columns
    part = graph.output_node().args[0]
    assert targets(graph) == [aten.slice.Tensor]
    assert expression(value(part).shape[0]) == expression(value(x).shape[1] // 2)
    assert value(x).shape[0].node.shape_env.guards == []


def test_a_size_that_must_equal_a_number_is_this_number():
    graph = traced(lambda x: x + 1 if x.shape[1] == 4 else x, x=X)
    rows, columns = map(expression, value(graph.output_node().args[0]).shape)
    assert rows.is_Symbol and columns == 4


def test_a_call_that_writes_its_operand_is_read_instead_of_it():
    def function(x):
        ones = torch.zeros_like(x)
        ones.add_(1)
        return ones * x

    graph = traced(function, x=X)
    assert targets(graph) == [aten.zeros_like.default, aten.add_.Tensor, aten.mul.Tensor]
    (product,) = graph.find_nodes(op="call_function", target=aten.mul.Tensor)
    assert product.args[0].target is aten.add_.Tensor


def test_parts_of_a_result_are_nodes():
    graph = traced(lambda x: x.topk(2).indices, x=X)
    assert targets(graph) == [aten.topk.default, operator.getitem, operator.getitem]
    indices = graph.output_node().args[0]
    assert indices.args[1] == 1 and value(indices).dtype == torch.int64


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_function_sees_the_device_of_the_example(device):
    x = tensor_example(9, 4, device=device)
    graph = traced(lambda x: x.cos() if x.device.type == "cpu" else x.sin(), x=x)
    assert targets(graph) == [aten.cos.default if device == "cpu" else aten.sin.default]


def test_a_tensor_that_is_not_an_argument_is_an_error():
    two = torch.tensor(2.0)
    with pytest.raises(ValueError, match="pattern: reads a tensor that is not an argument"):
        traced(lambda x: x * two, x=X)
