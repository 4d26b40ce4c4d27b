"""Spell the columns of pairs in one way: every second column of x.

x.view(.., n, 2)[..., i], x.view(.., n, 2).unbind(-1)[i]    =>    x[..., i::2]
"""

import operator
from collections.abc import Iterator

import torch
from torch.fx import GraphModule, Node

from atomc.graph.canonical import call, value
from atomc.graph.sizes import same_sizes
from atomc.rewriting.graph_pass import Context
from atomc.rewriting.rewrite import Fired

aten = torch.ops.aten


def columns_of_pairs(gm: GraphModule, context: Context) -> Iterator[Fired]:
    """Replace every part of a view as pairs."""
    graph = gm.graph
    for node in list(graph.nodes):
        part = _part(node)
        if part is None:
            continue
        x, i = part
        with graph.inserting_before(node):
            columns = graph.call_function(aten.slice.Tensor, (x, -1, i, None, 2))
        columns.meta.update(node.meta)
        node.replace_all_uses_with(columns)
        yield Fired("columns_of_pairs", node)


def _part(node: Node) -> tuple[Node, int] | None:
    """(x, i) if a node is part i of the pairs of x."""
    if node.target is aten.select.int:
        pairs, dim, i = node.args
    elif node.target is operator.getitem:
        unbind, i = node.args
        if not isinstance(unbind, Node) or unbind.target is not aten.unbind.int:
            return None
        pairs, dim = unbind.args[0], unbind.args[1] if len(unbind.args) > 1 else 0
    else:
        return None
    if not isinstance(pairs, Node) or not isinstance(i, int) or call(pairs).op != "view":
        return None
    [x] = call(pairs).operands
    *lead, width = value(x).shape
    shape = value(pairs).shape
    are_pairs = len(shape) > 1 and same_sizes(
        (*lead, width, 2), (*shape[:-2], 2 * shape[-2], shape[-1])
    )
    return (x, i % 2) if are_pairs and dim in (-1, len(shape) - 1) else None
