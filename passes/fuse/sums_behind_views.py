"""Sum over a process group behind a view instead of before it, so that the sum meets the add and
the norm behind the view.

x > all_reduce > view    =>    x > view > all_reduce

Models of transformers flatten [B, T, D] before the experts of a mixture, and view their sum as
before. Only if nothing else reads the sum, and x has its strides. Exact.
"""

from collections.abc import Iterator

from torch.fx import GraphModule, Node

from atomc.graph.canonical import call, only_reader, value
from atomc.graph.edit import copy_with, replace
from atomc.graph.strides import same_strides
from atomc.rewriting.graph_pass import Context
from atomc.rewriting.rewrite import Fired


def sums_behind_views(gm: GraphModule, context: Context) -> Iterator[Fired]:
    """Move every such sum of the graph."""
    for node in list(gm.graph.nodes):
        if node.op == "call_function" and call(node).op == "view" and _can_move(node):
            yield Fired("sums_behind_views", _move(node))


def _can_move(view: Node) -> bool:
    [total, *_] = call(view).operands
    if total.op != "call_function" or call(total).op != "atom::all_reduce":
        return False
    [x] = call(total).operands
    return only_reader(total) is view and same_strides(value(x), value(total))


def _move(view: Node) -> Node:
    """The sum behind the view."""
    [total, *_] = call(view).operands
    [x] = call(total).operands
    viewed = copy_with(view, view, {total: x})
    summed = copy_with(total, view, {x: viewed})
    replace(view, summed)
    return summed
