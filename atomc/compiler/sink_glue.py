"""Moves glue behind the kernels that do not read it, to its first reader, so that one kernel of
Inductor computes both.

    a = sigmoid(g); k = kernel(x); b = a * k    =>    k = kernel(x); a = sigmoid(g); b = a * k
"""

import math

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from atomc.graph.mutation import mutated, storage


def sink_glue(graph: Graph) -> None:
    """Move each call between kernels whose first reader is one between later kernels, right before
    that reader.

    Not moved: kernels, calls that write or draw random numbers, calls that read a tensor which the
    graph writes, and those whose inputs, kept until then, take more memory than the reader makes.
    """
    written = {storage(target) for node in graph.nodes for target in mutated(node)}
    position = {node: i for i, node in enumerate(graph.nodes)}
    kernels = [position[node] for node in graph.nodes if "kernel" in node.meta]
    for node in reversed(list(graph.nodes)):
        reader = min(node.users, key=position.__getitem__, default=None)
        if reader is None or not (_is_glue(node) and _is_glue(reader)):
            continue
        passed = any(position[node] < kernel < position[reader] for kernel in kernels)
        read = {storage(source) for source in node.all_input_nodes}
        if passed and not read & written and _is_smaller(read, reader):
            reader.prepend(node)
            position[node] = position[reader]


def _is_glue(node: Node) -> bool:
    """Whether a node computes one tensor from others, and nothing else."""
    random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    return (
        node.op == "call_function"
        and "kernel" not in node.meta
        and isinstance(node.meta.get("val"), Tensor)
        and not mutated(node)
        and not random
    )


def _is_smaller(read: set[Node], reader: Node) -> bool:
    """Whether what is read, inputs of the graph apart, is known to be no larger than the result."""
    values = [node.meta.get("val") for node in read if node.op != "placeholder"]
    sizes = [_num_bytes(value) for value in values if isinstance(value, Tensor)]
    return statically_known_true(sum(sizes) <= _num_bytes(reader.meta["val"]))


def _num_bytes(value: Tensor) -> int | torch.SymInt:
    return math.prod(value.shape) * value.dtype.itemsize
