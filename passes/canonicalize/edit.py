"""Changes of single nodes in a graph."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import Argument

from atomc.graph.canonical import call, value
from atomc.rewriting.rewrite import infer

HALVES = (torch.float16, torch.bfloat16)


def insert(
    graph: Graph,
    before: Node,
    target: Callable[..., Tensor],
    args: Sequence[Argument],
    **kwargs: Argument,
) -> Node:
    """A call in front of a node, with the metadata of that node."""
    with graph.inserting_before(before):
        made = graph.call_function(target, tuple(args), kwargs)
    made.meta = {key: item for key, item in before.meta.items() if key not in ("val", "canonical")}
    infer(graph, made)
    return made


def copy_with(graph: Graph, node: Node, before: Node, operands: Mapping[Node, Node]) -> Node:
    """A copy of a call in front of a node, with other operands in the place of some."""
    with graph.inserting_before(before):
        made = graph.node_copy(node, lambda operand: operands.get(operand, operand))
    del made.meta["val"]
    made.meta.pop("canonical", None)
    infer(graph, made)
    return made


def replace(graph: Graph, node: Node, new: Node) -> None:
    """Let the readers of a node read another one."""
    node.replace_all_uses_with(new)
    graph.erase_node(node)


def only_reader(node: Node) -> Node | None:
    """The reader of a node with one reader."""
    [*readers] = node.users
    return readers[0] if len(readers) == 1 else None


def factor(node: Node) -> float | None:
    """The constant by which a node multiplies its operand, or None."""
    here = call(node)
    by = here.attrs.get("other")
    if len(here.operands) != 1 or not isinstance(by, int | float) or "rounding_mode" in here.attrs:
        return None
    if here.op == "mul":
        return float(by)
    return 1 / by if here.op == "div" and by else None


def uncast(node: Node, dtypes: Sequence[torch.dtype] = HALVES) -> Node | None:
    """The operand of a cast to fp32 from one of these dtypes."""
    here = call(node)
    if here.op != "cast" or value(node).dtype != torch.float32:
        return None
    return here.operands[0] if value(here.operands[0]).dtype in dtypes else None
