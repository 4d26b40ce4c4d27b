"""A new tensor that is filled slice by slice, until nothing of it is left, is a cat.

empty > slice_scatter(a, dim, 0, n) > slice_scatter(b, dim, n, end)    =>    cat([a, b], dim)
"""

from typing import Any

import torch
from torch.fx import GraphModule, Node

from atomc.graph.canonical import call, dim_of, value
from atomc.graph.sizes import known_equal
from atomc.rewriting.graph_pass import Context
from atomc.rewriting.rewrite import Fired, remove_dead_nodes

aten = torch.ops.aten
EMPTY = ("new_empty", "new_empty_strided", "empty", "empty_like", "empty_strided")


def cat_of_slices(gm: GraphModule, context: Context) -> list[Fired]:
    """Replace the last write of every tensor that its writes fill."""
    graph = gm.graph
    fired = []
    for node in list(graph.nodes):
        parts = _parts(node)
        if not parts:
            continue
        with graph.inserting_before(node):
            cat = graph.call_function(aten.cat.default, (parts, dim_of(call(node).attrs["dim"])))
        cat.meta.update(node.meta)
        node.replace_all_uses_with(cat)
        fired.append(Fired("cat_of_slices", node, {}))
    if fired:
        remove_dead_nodes(graph)
    return fired


def _parts(node: Node) -> list[Node]:
    """What fills a tensor along one dimension, in order of place; nothing if parts of it are left,
    or written twice.
    """
    written: list[tuple[Any, Any, Node]] = []
    last = node
    while node.target is aten.slice_scatter.default:
        where = {name: given for name, given in call(node).attrs.items() if name in ("dim", "step")}
        if where.get("step", 1) != 1 or where["dim"] != call(last).attrs["dim"]:
            return []
        target, part = call(node).operands
        written.append((*_range(node), part))
        node = target
    if not written or call(node).op not in EMPTY:
        return []
    size = value(last).shape[call(last).attrs["dim"]]
    filled: Any = 0
    parts: list[Node] = []
    while not known_equal(filled, size):
        found = [(end, part) for start, end, part in written if known_equal(start, filled)]
        if len(found) != 1 or value(found[0][1]).dtype != value(last).dtype:
            return []
        filled = found[0][0]
        parts.append(found[0][1])
    return parts if len(parts) == len(written) else []


def _range(node: Node) -> tuple[Any, Any]:
    """The first column that is written, and the one behind the last."""
    attrs = call(node).attrs
    start = attrs.get("start") or 0
    return start, start + value(call(node).operands[1]).shape[attrs["dim"]]
