"""A view of a sum becomes a sum of views, so that a norm and the next sum read the same value.

view(a + b)    =>    view(a) + view(b)

Only if the sum has no other reader, its view has several, and the last dimension stays. Exact.
"""

from torch.fx import Graph, Node

from atomc.graph.canonical import call, only_reader, value
from atomc.graph.edit import copy_with, replace
from atomc.graph.sizes import known_equal, same_shape
from atomc.graph.strides import same_strides


def views_before_sums(graph: Graph) -> list[Node]:
    """Change every such view in the graph. Returns what was replaced."""
    changed = []
    for node in list(graph.nodes):
        if call(node).op == "view" and len(node.users) > 1 and _can_move(node):
            _move(node)
            changed.append(node)
    return changed


def _can_move(view: Node) -> bool:
    """Whether it is a view of a sum of two tensors that have the strides of the sum."""
    [total] = call(view).operands
    here = call(total)
    both = value(view).dim() > 0 and value(total).dim() > 0
    keeps_rows = both and known_equal(value(view).shape[-1], value(total).shape[-1])
    return (
        keeps_rows
        and here.op == "add"
        and len(here.operands) == 2
        and only_reader(total) is not None
        and all(
            same_shape(value(part), value(total)) and same_strides(value(part), value(total))
            for part in here.operands
        )
    )


def _move(view: Node) -> None:
    [total] = call(view).operands
    viewed = {part: copy_with(view, view, {total: part}) for part in call(total).operands}
    replace(view, copy_with(total, view, viewed))
