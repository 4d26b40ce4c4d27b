"""Running graphs a node at a time: as they are, or with fp32 in the place of the 16-bit dtypes."""

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from atomc.graph.inputs import step_input
from atomc.graph.mutation import mutated
from atomc.op import op_of
from atomc.ops.inputs import StepInput

NARROW = (torch.bfloat16, torch.float16)
Values = dict[str, Any]


def widened(given: Any) -> Any:
    """An argument with fp32 in the place of 16-bit dtypes; the numbers stay what they are."""
    if isinstance(given, Tensor) and given.dtype in NARROW:
        return given.to(torch.float32)
    return torch.float32 if isinstance(given, torch.dtype) and given in NARROW else given


def computed(gm: GraphModule, node: Node, read: Callable[[Node], Any], *, exact: bool = False) -> Any:
    """What a node gives, of the values that `read` has for its inputs. exact: in fp32.

    An op is run as its meaning. What it writes in place is written into copies.
    """
    if node.op == "get_attr":
        return operator.attrgetter(str(node.target))(gm)
    given: Any = torch.fx.node.map_arg((node.args, node.kwargs), read)
    if exact:
        given = torch.fx.node.map_aggregate(given, widened)
    written = {id(read(target)) for target in mutated(node)}
    if written:
        given = torch.fx.node.map_aggregate(given, lambda x: _copy(x) if id(x) in written else x)
    op = op_of(node.target)
    target = node.target if op is None else op.reference
    assert callable(target), node.format_node()
    args, kwargs = given
    return target(*args, **kwargs)


def _copy(given: Any) -> Any:
    return given.clone()


def outputs_of(gm: GraphModule, inputs: Mapping[str, Any], *, exact: bool = False) -> list[Any]:
    """What the graph returns for inputs by name; each value is freed behind its last reader."""
    order = list(gm.graph.nodes)
    last = last_readers(gm.graph)
    known: Values = {}
    for i, node in enumerate(order):
        if node.op == "output":
            return flat(torch.fx.node.map_arg(node.args[0], lambda n: known[n.name]))
        if node.op == "placeholder":
            known[node.name] = inputs[node.name]
        else:
            known[node.name] = computed(gm, node, lambda n: known[n.name], exact=exact)
        forget(known, last, i)
    raise AssertionError("a graph without an output")


def last_readers(graph: Graph) -> dict[str, int]:
    """Node -> the number of the last node that reads it, itself if none does."""
    last: dict[str, int] = {}
    for i, node in enumerate(graph.nodes):
        last[node.name] = i
        last.update(dict.fromkeys((x.name for x in node.all_input_nodes), i))
    return last


def forget(known: Values, last: Mapping[str, int], now: int) -> None:
    """Drop the values that nobody reads from here on."""
    for name in [name for name in known if last.get(name, now) <= now]:
        del known[name]


def flat(value: Any) -> list[Any]:
    """The tensors and numbers in a value, in order."""
    if isinstance(value, Tensor) or not isinstance(value, Sequence):
        return [value]
    return [item for part in value for item in flat(part)]


def placeholders(gm: GraphModule, args: Iterable[Any]) -> Values:
    """Arguments by the names that the graph has for them."""
    return dict(zip((node.name for node in gm.graph.find_nodes(op="placeholder")), args, strict=True))


def of_step(gm: GraphModule, args: Iterable[Any]) -> dict[StepInput, Any]:
    """Those of the arguments that a step of the runtime carries."""
    nodes = gm.graph.find_nodes(op="placeholder")
    return {given: arg for node, arg in zip(nodes, args, strict=True) if (given := step_input(node)) is not None}
