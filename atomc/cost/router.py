"""The op that chose the experts of a mixture."""

from torch import Tensor
from torch.fx import Node

from atomc.graph.canonical import value
from atomc.ops.op import op_of
from atomc.ops.op_traits import Kind


def router_of(ids: object) -> Node | None:
    """The router whose result these ids are, cast, viewed, or sent by other processes; None if they
    are more than that.
    """
    assert isinstance(ids, Node)
    node = ids
    while (op := op_of(node.target)) is None or Kind.ROUTE not in op.kind:
        sent = None
        if op is not None and Kind.COLLECTIVE in op.kind:
            sent = op.bind(*node.args, **node.kwargs).get("ids")
        if isinstance(sent, Node):
            node = sent
            continue
        if len(node.all_input_nodes) != 1:
            return None
        (node,) = node.all_input_nodes
    return node


def num_experts_of(router: Node) -> int | None:
    """Among how many experts it chooses; None if that is not a number of the graph."""
    op = op_of(router.target)
    assert op is not None
    args = op.bind(*router.args, **router.kwargs)
    logits, weight = args.get("logits"), args.get("weight")
    size = None
    if isinstance(logits, Node) and isinstance(value(logits), Tensor):
        size = value(logits).shape[-1]
    elif isinstance(weight, Node) and isinstance(value(weight), Tensor):
        size = value(weight).shape[0]
    return size if isinstance(size, int) else None
