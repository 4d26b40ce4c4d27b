"""What a lowered op writes: its function has no schema that says so."""

import torch
from torch.fx import Graph

from atomc import ops
from atomc.graph.mutation import mutated
from atomc.graph.node_record import NodeRecord, set_record


def test_a_lowered_call_writes_what_its_op_says_by_place_and_by_name() -> None:
    op = ops.REGISTRY["kv_write"]
    names = list(op.signature.parameters)
    assert op.mutates
    graph = Graph()
    given = {name: graph.placeholder(name) for name in names}
    workspace = graph.placeholder("workspace")
    by_place = graph.call_function(op.reference, tuple(given.values()))
    by_name = graph.call_function(op.reference, (), {**given, "workspace": workspace})
    for call in (by_place, by_name):
        assert mutated(call) == []
        set_record(call, NodeRecord(op="kv_write"))
        assert mutated(call) == [given[name] for name in op.mutates]


def test_a_call_on_a_list_of_tensors_writes_each_of_them() -> None:
    graph = Graph()
    tensors = [graph.placeholder(name) for name in "ab"]
    assert (
        mutated(graph.call_function(torch.ops.aten._foreach_add_.Scalar, (tensors, 1))) == tensors
    )


def test_a_lowered_call_that_writes_nothing() -> None:
    graph = Graph()
    call = graph.call_function(torch.neg, (graph.placeholder("x"),))
    set_record(call, NodeRecord(op="silu_and_mul"))
    assert mutated(call) == []
