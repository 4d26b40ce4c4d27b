"""Changes of single nodes in a graph."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import Argument

from atomc.graph.canonical import value
from atomc.graph.node_record import NodeRecord, set_record
from atomc.torch_compat.tracing import fake_mode_of


def insert(
    before: Node, target: Callable[..., Tensor], *args: Argument, **kwargs: Argument
) -> Node:
    """A call in front of a node, with the metadata of that node."""
    graph = before.graph
    with graph.inserting_before(before):
        node = graph.call_function(target, args, kwargs)
    node.meta = {key: item for key, item in before.meta.items() if key != "val"}
    infer(node)
    return node


def add_input(
    graph: Graph, name: str, record: NodeRecord, make: Callable[[], Tensor] | None = None
) -> Node:
    """A new input behind all others. make: returns its fake value."""
    with graph.inserting_after(graph.find_nodes(op="placeholder")[-1]):
        node = graph.placeholder(name)
    set_record(node, record)
    if make is not None:
        mode = fake_mode_of(graph)
        assert mode is not None
        with mode:
            node.meta["val"] = make()
    return node


def copy_with(node: Node, before: Node, operands: Mapping[Node, Node]) -> Node:
    """A copy of a call in front of a node, with other operands in the place of some."""
    with node.graph.inserting_before(before):
        copy = node.graph.node_copy(node, lambda operand: operands.get(operand, operand))
    del copy.meta["val"]
    infer(copy)
    return copy


def infer(node: Node) -> None:
    """Compute a node's fake value from the fake values of its inputs."""
    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), value)
    mode = fake_mode_of(node.graph)
    assert mode is not None and callable(node.target)
    with mode, torch.no_grad():
        node.meta["val"] = node.target(*args, **kwargs)


def replace(node: Node, new: Node) -> None:
    """Let the readers of a node read another one."""
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)


def nodes_between(first: Node, last: Node) -> list[Node]:
    """The nodes after `first` and before `last`, in graph order."""
    nodes, node = [], first.next
    while node is not last:
        nodes.append(node)
        node = node.next
    return nodes
