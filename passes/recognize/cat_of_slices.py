"""Replace writes that fill a new tensor slice by slice by a cat.

empty > slice_scatter(a, dim, 0, n) > slice_scatter(b, dim, n, end)    =>    cat([a, b], dim)
"""

from collections.abc import Iterator

import torch
from torch.fx import GraphModule, Node

from atomc.graph.canonical import call, dim_of, value
from atomc.graph.expressions import Size
from atomc.graph.sizes import known_equal
from atomc.rewriting.graph_pass import Context
from atomc.rewriting.rewrite import Fired

aten = torch.ops.aten
EMPTY = ("new_empty", "new_empty_strided", "empty", "empty_like", "empty_strided")


def cat_of_slices(gm: GraphModule, context: Context) -> Iterator[Fired]:
    """Replace the last write of every tensor that its writes fill."""
    graph = gm.graph
    for node in list(graph.nodes):
        parts = _parts(node)
        if not parts:
            continue
        with graph.inserting_before(node):
            cat = graph.call_function(aten.cat.default, (parts, dim_of(call(node).attrs["dim"])))
        cat.meta.update(node.meta)
        node.replace_all_uses_with(cat)
        yield Fired("cat_of_slices", node)


def _parts(node: Node) -> list[Node]:
    """The parts that fill a tensor along one dimension, in order; none if they leave a gap or
    overlap.
    """
    written: list[tuple[Size, Size, Node]] = []
    last = node
    while node.target is aten.slice_scatter.default:
        where = {name: attr for name, attr in call(node).attrs.items() if name in ("dim", "step")}
        if where.get("step", 1) != 1 or where["dim"] != call(last).attrs["dim"]:
            return []
        target, part = call(node).operands
        written.append((*_range(node), part))
        node = target
    if not written or call(node).op not in EMPTY:
        return []
    size = value(last).shape[call(last).attrs["dim"]]
    filled: Size = 0
    parts: list[Node] = []
    while not known_equal(filled, size):
        next_parts = [(end, part) for start, end, part in written if known_equal(start, filled)]
        if len(next_parts) != 1 or value(next_parts[0][1]).dtype != value(last).dtype:
            return []
        filled = next_parts[0][0]
        parts.append(next_parts[0][1])
    return parts if len(parts) == len(written) else []


def _range(node: Node) -> tuple[Size, Size]:
    """The first column that is written, and the one after the last."""
    attrs = call(node).attrs
    start: Size = attrs.get("start") or 0  # type: ignore[assignment]
    return start, start + value(call(node).operands[1]).shape[dim_of(attrs["dim"])]
