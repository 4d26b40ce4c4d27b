"""Outlines repeated layers of Dynamo's graph into regions, so that one layer of each kind is
traced.

    layers.0: x > a > b > y                  y = invoke_subgraph(region, x, weights of layer 0)
    layers.1: y > a > b > z            =>    z = invoke_subgraph(region, y, weights of layer 1)

Dynamo creates such calls itself for layers that `atomc.prepare` marked. In other models Dynamo
traces every layer, but AOTAutograd need not.
"""

import operator
from collections import Counter
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field

import sympy
import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from atomc.capture.structural_hash import structural_key
from atomc.graph.canonical import Value
from atomc.graph.provenance import Stack, clean_path
from atomc.torch_compat.tracing import INVOKE_SUBGRAPH

MIN_LAYERS = 3  # tracing two layers takes as long as tracing one and inlining it twice
MIN_NODES = 8


@dataclass
class RepeatedLayer:
    """The consecutive nodes of one layer.

    stack    its nn_module_stack, the layer innermost
    inputs   the nodes that it reads, in order of first use; then the inputs with their dynamic
             sizes
    outputs  the nodes that are read outside of it
    """

    stack: Stack
    nodes: list[Node]
    inputs: list[Node] = field(default_factory=list)
    outputs: list[Node] = field(default_factory=list)


def outline(gm: GraphModule) -> int:
    """Replace the nodes of identical layers by calls of a region, in place. Returns the number of
    regions.
    """
    if any(_may_write(node) for node in gm.graph.nodes):  # another layer may read what was written
        return 0
    kinds: dict[Hashable, list[RepeatedLayer]] = {}
    sizes = _sizes(gm.graph)
    for layer in _layers(gm.graph):
        _find_inputs_and_outputs(layer, sizes)
        if len(layer.nodes) >= MIN_NODES and all(
            isinstance(_value(node), Tensor) for node in layer.outputs
        ):
            kinds.setdefault(_structural_hash(layer), []).append(layer)
    identical = [layers for layers in kinds.values() if len(layers) >= MIN_LAYERS]
    for number, layers in enumerate(identical):
        gm.add_submodule(f"outlined_{number}", GraphModule({}, _body(layers[0])))
    renamed: dict[Node, Node] = {}
    for number, layers in enumerate(identical):
        for layer in layers:
            _call(gm.graph, f"outlined_{number}", layer, renamed)
    if identical:
        gm.graph.lint()
        gm.recompile()
    return len(identical)


def _layers(graph: Graph) -> list[RepeatedLayer]:
    """Consecutive nodes of each outermost numbered module, without modules that are entered
    twice.
    """
    runs: list[RepeatedLayer] = []
    paths: list[str] = []
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr", "output"):
            continue
        path, stack = _numbered_module(node)
        if not runs or path != paths[-1]:
            runs.append(RepeatedLayer(stack, []))
            paths.append(path)
        runs[-1].nodes.append(node)
    times = Counter(paths)
    return [run for path, run in zip(paths, runs, strict=True) if path and times[path] == 1]


def _numbered_module(node: Node) -> tuple[str, Stack]:
    stack: dict[str, tuple[str, type[nn.Module] | str]] = {}
    for key, entry in (node.meta.get("nn_module_stack") or {}).items():
        stack[key] = entry
        path = clean_path(entry[0])
        if path.rpartition(".")[2].isdigit():
            return path, stack
    return "", {}


def _find_inputs_and_outputs(layer: RepeatedLayer, sizes: dict[sympy.Symbol, Node]) -> None:
    inside = set(layer.nodes)
    inputs = dict.fromkeys(
        x for node in layer.nodes for x in node.all_input_nodes if x not in inside
    )
    symbols = {s for x in inputs for s in _symbols(_value(x))}
    inputs |= dict.fromkeys(node for symbol, node in sizes.items() if symbol in symbols)
    layer.inputs = list(inputs)
    layer.outputs = [node for node in layer.nodes if any(user not in inside for user in node.users)]


def _sizes(graph: Graph) -> dict[sympy.Symbol, Node]:
    """Symbol -> the graph input that is this size."""
    sizes = {}
    for node in graph.find_nodes(op="placeholder"):
        if isinstance(size := _value(node), torch.SymInt):
            sizes[size.node.expr] = node
    return sizes


def _symbols(value: Value) -> Iterator[sympy.Symbol]:
    if isinstance(value, Tensor):
        for size in (*value.shape, *value.stride()):
            if isinstance(size, torch.SymInt):
                yield from size.node.expr.free_symbols


def _structural_hash(layer: RepeatedLayer) -> Hashable:
    """A key that is equal for layers with the same computation and the same kinds of inputs."""
    numbers = {node: i for i, node in enumerate([*layer.inputs, *layer.nodes])}
    return (
        tuple(structural_key(_value(node), numbers) for node in layer.inputs),
        tuple(
            (node.op, node.target, structural_key((node.args, node.kwargs, _value(node)), numbers))
            for node in layer.nodes
        ),
        tuple(numbers[node] for node in layer.outputs),
    )


def _body(layer: RepeatedLayer) -> Graph:
    graph = Graph()
    copies: dict[Node, Node] = {}
    for i, node in enumerate(layer.inputs):
        copies[node] = graph.placeholder(f"input_{i}")
        copies[node].meta["example_value"] = _value(node)
    for node in layer.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in layer.outputs))
    return graph


def _call(graph: Graph, name: str, layer: RepeatedLayer, renamed: dict[Node, Node]) -> None:
    """Replace a layer's nodes by a call. renamed: outputs of replaced layers -> their new nodes."""
    inside = set(layer.nodes)
    operands = [renamed.get(node, node) for node in layer.inputs]
    with graph.inserting_before(layer.nodes[-1].next):
        call = graph.call_function(INVOKE_SUBGRAPH, (graph.get_attr(name), name, *operands))
        call.meta.update(
            nn_module_stack=layer.stack, example_value=tuple(map(_value, layer.outputs))
        )
        for i, node in enumerate(layer.outputs):
            output = graph.call_function(operator.getitem, (call, i))
            output.meta.update(node.meta)
            node.replace_all_uses_with(output, lambda user: user not in inside)
            renamed[node] = output
    for node in reversed(layer.nodes):
        graph.erase_node(node)


def _may_write(node: Node) -> bool:
    if node.op == "call_module":
        return True
    if node.op == "call_method":
        return str(node.target).endswith("_") and not str(node.target).endswith("__")
    if node.op != "call_function":
        return False
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.is_mutable
    if isinstance(node.target, torch._ops.OpOverloadPacket):
        return any(schema.is_mutable for schema in node.target._schemas.values())
    name = getattr(node.target, "__name__", "")
    in_place = (
        name.endswith("_")
        and not name.endswith("__")
        and getattr(operator, name, None) is not node.target
    )
    return (
        in_place
        or "out" in node.kwargs
        or node.kwargs.get("inplace") is True
        or node.target in _WRITING
    )


_WRITING = {
    operator.setitem,
    operator.delitem,
    INVOKE_SUBGRAPH,
    *(
        function
        for name, function in vars(operator).items()
        if name.startswith("i") and f"__{name}__" in vars(operator)
    ),
}


def _value(node: Node) -> Value:
    value: Value = node.meta.get("example_value")
    return value
