"""Integers that ops on int64 tensors read, such as the position of the next token, as tensors.

    arange(8) + max(position - 7, 0)    =>    arange(8) + x,    x = full((), max(position - 7, 0))

The host computes the integer and fills the tensor, an additional input, in each call. The graph
reads no integer any more, so that neither a CUDA graph nor a repeated call is one for each value.
"""

import operator
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from atomc.compiler.host_integers import host_function, integers_of, symbols_of_sizes
from atomc.torch_compat.core import FakeTensor, GraphFunction, Input, Outputs
from atomc.torch_compat.tracing import editable_copy, fake_mode_of

# Equal for an integer and for an int64 tensor of one element beside an int64 tensor.
_OPS = {
    *(operator.add, operator.sub, operator.mul),
    *(operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne),
    "__eq__",  # as Dynamo of torch 2.11 spells ==
}


class NumberTensors(NamedTuple):
    """A graph with additional inputs, examples of all inputs, and what gives a callable of it the
    signature of the graph before.
    """

    gm: GraphModule
    example_inputs: Sequence[Input]
    wrap: Callable[[GraphFunction], GraphFunction]


def number_tensors(gm: GraphModule, example_inputs: Sequence[Input]) -> NumberTensors:
    """Let tensors take the place of such integers, where tensors depend on the integer inputs
    behind them in no other way.

    gm  Dynamo's graph; it stays as it is
    """
    mode = fake_mode_of(gm.graph)
    if mode is None or not _reads(gm.graph):
        return NumberTensors(gm, example_inputs, lambda call: call)
    copy = editable_copy(gm)
    reads = _reads(copy.graph)
    compute = host_function(gm.graph, [node.name for node, _ in reads])
    devices = [device for _, device in reads]
    real = not any(isinstance(x, FakeTensor) for x in example_inputs)
    examples = list(example_inputs)
    last = [*copy.graph.find_nodes(op="placeholder")][-1]
    for number, ((node, device), readers) in enumerate(reads.items()):
        with copy.graph.inserting_after(last):
            last = copy.graph.placeholder(f"number_{number}")
        with mode:
            last.meta["example_value"] = torch.full((), 1, dtype=torch.int64, device=device)
        for reader in readers:
            reader.replace_input_with(node, last)
        filled = torch.full((), 1, dtype=torch.int64, device=device)
        examples.append(filled if real else last.meta["example_value"])

    def wrap(call: GraphFunction) -> GraphFunction:
        def with_tensors(*args: Input) -> Outputs:
            numbers = zip(compute(args), devices, strict=True)
            filled = [torch.full((), n, dtype=torch.int64, device=device) for n, device in numbers]
            return call(*args, *filled)

        return with_tensors

    return NumberTensors(copy, examples, wrap)


def _reads(graph: Graph) -> dict[tuple[Node, torch.device], list[Node]]:
    """Integers that may be tensors, each on a device, with the ops that read them there."""
    integers, fixed = integers_of(graph), symbols_of_sizes(graph)
    for node, symbols in integers.items():
        if not all(reader in integers or _takes_tensor(node, reader) for reader in node.users):
            fixed |= symbols
    reads: dict[tuple[Node, torch.device], list[Node]] = {}
    for node, symbols in integers.items():
        if symbols and not symbols & fixed:
            for reader in node.users:
                if reader.op != "output" and reader not in integers:
                    device = reader.meta["example_value"].device
                    reads.setdefault((node, device), []).append(reader)
    return reads


def _takes_tensor(integer: Node, reader: Node) -> bool:
    """Whether a node that reads an integer gives the same for a tensor of it; the output reads it
    as it is.
    """
    if reader.op == "output":
        return True
    others = [x for x in reader.args if x is not integer]
    value = others[0].meta.get("example_value") if others and isinstance(others[0], Node) else None
    return (
        reader.target in _OPS
        and len(reader.args) == 2
        and isinstance(value, Tensor)
        and value.dtype == torch.int64
        and value.dim() > 0
    )
