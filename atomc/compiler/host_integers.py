"""Integers of a graph that only integers among its outputs depend on, such as a counter of tokens.

    counter -> counter + 1 -> output

The host computes these outputs in each call. The rest of the graph gets the same integer in all
calls, so that neither a CUDA graph nor a repeated call is one for each value of a counter.
"""

from collections.abc import Callable, Sequence

import torch
from torch import SymInt, Tensor
from torch.fx import Graph, GraphModule, Node

from atomc.torch_compat.core import GraphFunction, Input, Outputs


def compute_on_host(gm: GraphModule, call: GraphFunction) -> GraphFunction:
    """A callable like `call`, the compiled graph, that computes such outputs itself; `call` if the
    graph has none.

    gm  Dynamo's graph, whose outputs are a sequence
    """
    integers = integers_of(gm.graph)
    outputs: list[object] = list(gm.graph.output_node().args[0])  # type: ignore[arg-type]
    results = {i: x.name for i, x in enumerate(outputs) if isinstance(x, Node) and x in integers}
    unread = _unread(gm.graph, integers)
    if not unread:
        return call
    compute = host_function(gm.graph, [*results.values()])
    constants: dict[int, Input] = {}

    def call_with_constants(*args: Input) -> Outputs:
        if not constants:
            constants.update({i: args[i] for i in unread})
        fixed = list(args)
        for i, value in constants.items():
            fixed[i] = value
        returned = call(*fixed)
        if not results:
            return returned
        assert isinstance(returned, Sequence)
        merged: list[Outputs] = list(returned)
        for i, number in zip(results, compute(args), strict=True):
            merged[i] = number
        return merged

    return call_with_constants


def _unread(graph: Graph, integers: dict[Node, set[object]]) -> list[int]:
    """The numbers of the integer inputs that no tensor depends on."""
    sizes = symbols_of_sizes(graph)
    return [
        i
        for i, node in enumerate(graph.find_nodes(op="placeholder"))
        if node in integers and not integers[node] & sizes and _only_integers_read(node, integers)
    ]


def integers_of(graph: Graph) -> dict[Node, set[object]]:
    """Integer inputs, and what is computed from nothing but them, with their symbols."""
    integers: dict[Node, set[object]] = {}
    for node in graph.nodes:
        value = node.meta.get("example_value")
        if not isinstance(value, SymInt):
            continue
        operands = node.all_input_nodes
        if node.op == "placeholder" or (
            node.op == "call_function" and operands and all(x in integers for x in operands)
        ):
            integers[node] = set(value.node.expr.free_symbols)
    return integers


def _only_integers_read(node: Node, integers: dict[Node, set[object]]) -> bool:
    """Whether a node is read at most by the output, and by integers of which this holds."""
    return all(
        reader.op == "output" or (reader in integers and _only_integers_read(reader, integers))
        for reader in node.users
    )


def symbols_of_sizes(graph: Graph) -> set[object]:
    """The symbols in the layouts of a graph's tensor inputs."""
    tensors = [node.meta.get("example_value") for node in graph.find_nodes(op="placeholder")]
    numbers = [
        number
        for x in tensors
        if isinstance(x, Tensor)
        for number in (*x.shape, *x.stride(), x.storage_offset())
    ]
    return {
        symbol
        for number in numbers
        if isinstance(number, SymInt)
        for symbol in number.node.expr.free_symbols
    }


def host_function(
    graph: Graph, results: Sequence[str]
) -> Callable[[Sequence[Input]], Sequence[int]]:
    """A function of the graph's inputs that computes the integers of these names."""
    integers = integers_of(graph)
    host = Graph()
    # Only these are passed on: a call with hundreds of parameters costs more than what it computes.
    read = [i for i, x in enumerate(graph.find_nodes(op="placeholder")) if x in integers]
    copies: dict[Node, Node] = {}
    for node in integers:
        copies[node] = host.node_copy(node, copies.__getitem__)
    by_name = {node.name: copy for node, copy in copies.items()}
    host.output(tuple(by_name[name] for name in results))
    host.eliminate_dead_code()
    forward = GraphModule(torch.nn.Module(), host).forward
    return lambda inputs: forward(*[inputs[i] for i in read])
