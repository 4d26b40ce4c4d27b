"""Moves glue behind the kernels that do not read it, to its first reader, so that one kernel of
Inductor computes both.

    a = sigmoid(g); k = kernel(x); b = a * k    =>    k = kernel(x); a = sigmoid(g); b = a * k
"""

import itertools
import math

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from atomc.graph.mutation import mutated, storage
from atomc.graph.node_record import record_of


def sink_pointwise(graph: Graph) -> None:
    """Move each call between kernels whose first reader is one between later kernels, right before
    that reader.

    Not moved: kernels, calls that draw random numbers, calls with an operand which the graph, or
    the call itself, writes, and those whose inputs, kept until then, take more memory than the
    reader makes.
    """
    written = {storage(target) for node in graph.nodes for target in mutated(node)}
    behind = _kernels_before(graph)
    for node in reversed(list(graph.nodes)):
        reader = min(node.users, default=None)  # nodes are compared by their order in the graph
        if reader is None or not (_is_glue(node) and _is_glue(reader)):
            continue
        read = {storage(source) for source in node.all_input_nodes}
        passed = behind[reader] > behind[node]
        if passed and not read & written and _is_smaller(read, reader):
            reader.prepend(node)
            behind[node] = behind[reader]


def _kernels_before(graph: Graph) -> dict[Node, int]:
    """Behind how many kernels each node is."""
    kernels = itertools.accumulate(bool(record_of(node).kernel) for node in graph.nodes)
    return dict(zip(graph.nodes, kernels, strict=True))


def _is_glue(node: Node) -> bool:
    """Whether a node computes one tensor from others, and draws no random numbers."""
    random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    return (
        node.op == "call_function"
        and not record_of(node).kernel
        and isinstance(node.meta.get("val"), Tensor)
        and not random
    )


def _is_smaller(read: set[Node], reader: Node) -> bool:
    """Whether what is read, inputs of the graph apart, is known to be no larger than the result."""
    values = [node.meta.get("val") for node in read if node.op != "placeholder"]
    sizes = [_num_bytes(value) for value in values if isinstance(value, Tensor)]
    return statically_known_true(sum(sizes) <= _num_bytes(reader.meta["val"]))


def _num_bytes(value: Tensor) -> int | torch.SymInt:
    return math.prod(value.shape) * value.dtype.itemsize
