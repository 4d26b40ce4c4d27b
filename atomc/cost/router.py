"""The op that chose the experts of a mixture."""

from torch import Tensor
from torch.fx import Node

from atomc.graph.canonical import value
from atomc.graph.op_call import arguments_of, kind_of
from atomc.ops.op_traits import Kind


def router_of(ids: Node) -> Node | None:
    """The router whose result these ids are, cast, viewed, or sent by other processes; None if they
    are more than that.
    """
    node = ids
    while Kind.ROUTE not in kind_of(node):
        sent = arguments_of(node).get("ids") if Kind.COLLECTIVE in kind_of(node) else None
        if isinstance(sent, Node):
            node = sent
            continue
        if len(node.all_input_nodes) != 1:
            return None
        (node,) = node.all_input_nodes
    return node


def num_experts_of(router: Node) -> int | None:
    """Among how many experts it chooses; None if that is not a number of the graph."""
    args = arguments_of(router)
    logits, weight = args.get("logits"), args.get("weight")
    size = None
    if isinstance(logits, Node) and isinstance(value(logits), Tensor):
        size = value(logits).shape[-1]
    elif isinstance(weight, Node) and isinstance(value(weight), Tensor):
        size = value(weight).shape[0]
    return size if isinstance(size, int) else None
