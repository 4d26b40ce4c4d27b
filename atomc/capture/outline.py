"""Repeated layers of Dynamo's graph as regions, so that one of each kind is traced and the others are stamped.

    layers.0: x > a > b > y                  y = invoke_subgraph(region, x, weights of layer 0)
    layers.1: y > a > b > z            =>    z = invoke_subgraph(region, y, weights of layer 1)

Dynamo makes such calls itself for layers that `atomc.prepare` has marked. Of other models it traces every layer; what comes
after it need not.
"""

import operator
from collections import Counter
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from atomc.capture.structural_hash import spelled
from atomc.graph.provenance import clean_path
from atomc.torch_compat.tracing import INVOKE_SUBGRAPH

LEAST_LAYERS = 3  # two are traced as fast as one is traced and stamped twice
LEAST_NODES = 8


@dataclass
class Layer:
    """The nodes of one layer, which stand together.

    stack    the modules around it, itself innermost
    inputs   what the nodes read from elsewhere, in the order in which they do; then the sizes that these have
    outputs  the nodes that others read
    """

    stack: dict[str, Any]
    nodes: list[Node]
    inputs: list[Node] = field(default_factory=list)
    outputs: list[Node] = field(default_factory=list)


def outline(gm: GraphModule) -> int:
    """Replace the nodes of layers that are alike by calls of a region, in place. Returns the number of kinds."""
    if any(_may_write(node) for node in gm.graph.nodes):  # who sees a write may be another layer
        return 0
    kinds: dict[Hashable, list[Layer]] = {}
    sizes = _sizes(gm.graph)
    for layer in _layers(gm.graph):
        _find_borders(layer, sizes)
        if len(layer.nodes) >= LEAST_NODES and all(isinstance(_value(node), Tensor) for node in layer.outputs):
            kinds.setdefault(_likeness(layer), []).append(layer)
    alike = [layers for layers in kinds.values() if len(layers) >= LEAST_LAYERS]
    for number, layers in enumerate(alike):
        gm.add_submodule(f"outlined_{number}", GraphModule({}, _body(layers[0])))
    renamed: dict[Node, Node] = {}
    for number, layers in enumerate(alike):
        for layer in layers:
            _call(gm.graph, f"outlined_{number}", layer, renamed)
    if alike:
        gm.graph.lint()
        gm.recompile()
    return len(alike)


def _layers(graph: Graph) -> list[Layer]:
    """Runs of nodes of one numbered module, the outermost that is. One that is entered twice is none."""
    runs: list[Layer] = []
    paths: list[str] = []
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr", "output"):
            continue
        path, stack = _numbered(node)
        if not runs or path != paths[-1]:
            runs.append(Layer(stack, []))
            paths.append(path)
        runs[-1].nodes.append(node)
    times = Counter(paths)
    return [run for path, run in zip(paths, runs, strict=True) if path and times[path] == 1]


def _numbered(node: Node) -> tuple[str, dict[str, Any]]:
    stack: dict[str, Any] = {}
    for key, entry in (node.meta.get("nn_module_stack") or {}).items():
        stack[key] = entry
        path = clean_path(entry[0])
        if path.rpartition(".")[2].isdigit():
            return path, stack
    return "", {}


def _find_borders(layer: Layer, sizes: dict[Any, Node]) -> None:
    inside = set(layer.nodes)
    inputs = dict.fromkeys(x for node in layer.nodes for x in node.all_input_nodes if x not in inside)
    symbols = {s for x in inputs for s in _symbols(_value(x))}
    inputs |= dict.fromkeys(node for symbol, node in sizes.items() if symbol in symbols)
    layer.inputs = list(inputs)
    layer.outputs = [node for node in layer.nodes if any(user not in inside for user in node.users)]


def _sizes(graph: Graph) -> dict[Any, Node]:
    """The inputs of the graph that are sizes, by symbol."""
    found = {}
    for node in graph.find_nodes(op="placeholder"):
        if isinstance(_value(node), torch.SymInt):
            found[_value(node).node.expr] = node
    return found


def _symbols(value: Any) -> Iterator[Any]:
    if isinstance(value, Tensor):
        for size in (*value.shape, *value.stride()):
            if isinstance(size, torch.SymInt):
                yield from size.node.expr.free_symbols


def _likeness(layer: Layer) -> Hashable:
    """Equal for layers that compute the same of inputs alike."""
    numbers = {node: i for i, node in enumerate([*layer.inputs, *layer.nodes])}
    return (
        tuple(spelled(_value(node), numbers) for node in layer.inputs),
        tuple((node.op, node.target, spelled((node.args, node.kwargs, _value(node)), numbers)) for node in layer.nodes),
        tuple(numbers[node] for node in layer.outputs),
    )  # fmt: skip


def _body(layer: Layer) -> Graph:
    graph = Graph()
    copies: dict[Node, Node] = {}
    for i, node in enumerate(layer.inputs):
        copies[node] = graph.placeholder(f"input_{i}")
        copies[node].meta["example_value"] = _value(node)
    for node in layer.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in layer.outputs))
    return graph


def _call(graph: Graph, name: str, layer: Layer, renamed: dict[Node, Node]) -> None:
    """Replace a layer's nodes by a call. renamed: outputs of layers that were replaced -> what stands for them."""
    inside = set(layer.nodes)
    operands = [renamed.get(node, node) for node in layer.inputs]
    with graph.inserting_before(layer.nodes[-1].next):
        call = graph.call_function(INVOKE_SUBGRAPH, (graph.get_attr(name), name, *operands))
        call.meta.update(nn_module_stack=layer.stack, example_value=tuple(map(_value, layer.outputs)))
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
    in_place = name.endswith("_") and not name.endswith("__") and getattr(operator, name, None) is not node.target
    return in_place or "out" in node.kwargs or node.kwargs.get("inplace") is True or node.target in _WRITING


_WRITING = {operator.setitem, operator.delitem, INVOKE_SUBGRAPH, *(
    function for name, function in vars(operator).items() if name.startswith("i") and f"__{name}__" in vars(operator))}


def _value(node: Node) -> Any:
    return node.meta.get("example_value")
