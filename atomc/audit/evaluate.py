"""Evaluates graphs node by node, in their own dtypes or with fp32 instead of 16-bit dtypes."""

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import Argument

from atomc.graph.mutation import mutated
from atomc.graph.node_record import step_input
from atomc.ops.formats import HALVES
from atomc.ops.inputs import StepInput
from atomc.ops.op import op_of

# Values of nodes by name, of the types that FX allows.
Values = dict[str, Argument]


def upcast(given: Argument) -> Argument:
    """An argument with 16-bit tensors converted to fp32, and 16-bit dtypes replaced by it."""
    if isinstance(given, Tensor) and given.dtype in HALVES:
        return given.to(torch.float32)
    return torch.float32 if isinstance(given, torch.dtype) and given in HALVES else given


def evaluate_node(
    gm: GraphModule, node: Node, read: Callable[[Node], Argument], *, exact: bool = False
) -> Argument:
    """The result of a node for the input values that `read` gives. exact: in fp32.

    An op runs its reference. Tensors that it writes in place are cloned first.
    """
    if node.op == "get_attr":
        constant: Argument = operator.attrgetter(str(node.target))(gm)
        return constant
    arguments = torch.fx.node.map_arg((node.args, node.kwargs), read)
    if exact:
        arguments = torch.fx.node.map_aggregate(arguments, upcast)
    written = {id(read(target)) for target in mutated(node)}

    def unwritten(x: Argument) -> Argument:
        return x.clone() if isinstance(x, Tensor) and id(x) in written else x

    args, kwargs = torch.fx.node.map_aggregate(arguments, unwritten) if written else arguments
    op = op_of(node.target)
    target = node.target if op is None else op.reference
    assert callable(target), node.format_node()
    result: Argument = target(*args, **kwargs)
    return result


def evaluate_graph(
    gm: GraphModule, inputs: Mapping[str, Argument], *, exact: bool = False
) -> list[Argument]:
    """The outputs of the graph for inputs by name; each value is freed after its last use."""
    order = list(gm.graph.nodes)
    last = last_uses(gm.graph)
    values: Values = {}
    for i, node in enumerate(order):
        if node.op == "output":
            return flatten(torch.fx.node.map_arg(node.args[0], lambda n: values[n.name]))
        if node.op == "placeholder":
            values[node.name] = inputs[node.name]
        else:
            values[node.name] = evaluate_node(gm, node, lambda n: values[n.name], exact=exact)
        free_dead(values, last, i)
    raise AssertionError("a graph without an output")


def last_uses(graph: Graph) -> dict[str, int]:
    """Node name -> index of the last node that reads it, its own index if none does."""
    last: dict[str, int] = {}
    for i, node in enumerate(graph.nodes):
        last[node.name] = i
        last.update(dict.fromkeys((x.name for x in node.all_input_nodes), i))
    return last


def free_dead(known: Values, last: Mapping[str, int], now: int) -> None:
    """Delete the values that are not read after this node."""
    for name in [name for name in known if last.get(name, now) <= now]:
        del known[name]


def flatten(value: Argument) -> list[Argument]:
    """The tensors and numbers in a value, in order."""
    if isinstance(value, Tensor) or not isinstance(value, Sequence):
        return [value]
    return [item for part in value for item in flatten(part)]


def placeholders(gm: GraphModule, args: Iterable[Argument]) -> Values:
    """Arguments by the names of the graph's placeholders."""
    return dict(
        zip((node.name for node in gm.graph.find_nodes(op="placeholder")), args, strict=True)
    )


def step_tensors(gm: GraphModule, args: Iterable[Argument]) -> dict[StepInput, Tensor]:
    """The tensors among the arguments that the runtime takes from a step."""
    nodes = gm.graph.find_nodes(op="placeholder")
    return {
        field: arg
        for node, arg in zip(nodes, args, strict=True)
        if (field := step_input(node)) is not None and isinstance(arg, Tensor)
    }
