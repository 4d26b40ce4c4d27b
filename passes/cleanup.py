"""Tidying that changes no meaning: equal nodes become one, views that undo each other go."""

import operator
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from atomc.canonical import call, value
from atomc.graph_pass import Context
from atomc.match import mutated, same_attr
from atomc.rewrite import Fired, remove_dead_nodes
from atomc.sizes import known_equal, same_shape

_WHOLE = {"start": 0, "end": None, "step": 1}
_RANDOM = torch.Tag.nondeterministic_seeded


def tidy(gm: GraphModule, context: Context) -> list[Fired]:
    """Share equal nodes, drop views that do nothing, and drop what nobody reads."""
    fired = share_equal_nodes(gm.graph) + cancel_views(gm.graph)
    remove_dead_nodes(gm.graph)
    return fired


def share_equal_nodes(graph: Graph) -> list[Fired]:
    """Common subexpressions: a later node that computes what an earlier one did is replaced by it."""
    known: dict[Any, Node] = {}
    fired = []
    written = {id(target) for node in graph.nodes for target in mutated(node)}
    for node in list(graph.nodes):
        if node.op != "call_function" or not _pure(node) or any(id(a) in written for a in node.all_input_nodes):
            continue
        try:
            key = (node.target, _hashable(node.args), _hashable(node.kwargs))
            first = known.setdefault(key, node)
        except TypeError:  # an argument that cannot be a key: leave the node alone
            continue
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)
            fired.append(Fired("tidy", node, {}))
    return fired


def _pure(node: Node) -> bool:
    if node.target is operator.getitem:
        return True
    target = node.target
    return (isinstance(target, torch._ops.OpOverload) and not target._schema.is_mutable and _RANDOM not in target.tags
            and target not in (torch.ops.aten.empty.memory_format, torch.ops.aten.empty_like.default))


def _hashable(argument: Any) -> Any:
    if isinstance(argument, list | tuple):
        return tuple(_hashable(part) for part in argument)
    if isinstance(argument, dict):
        return tuple(sorted((name, _hashable(part)) for name, part in argument.items()))
    # 1, 1.0 and True are equal keys but not equal arguments.
    return argument if isinstance(argument, Node) else (type(argument), argument)


def cancel_views(graph: Graph) -> list[Fired]:
    """What gives back a tensor that is there: transposes that undo each other, slices of everything, and the like."""
    fired = []
    for node in list(graph.nodes):
        source = _same_as(node)
        if source is not None:
            node.replace_all_uses_with(source)
            graph.erase_node(node)
            fired.append(Fired("tidy", node, {}))
    return fired


def _same_as(node: Node) -> Node | None:
    """The earlier node that a view gives back, or None."""
    if node.op != "call_function":
        return None
    here = call(node)
    if here.op == "alias":
        return here.operands[0]
    if here.op == "cat":
        return _only_part(node)
    if here.op == "view" and same_shape(value(node), value(here.operands[0])):
        return here.operands[0]
    if here.op == "slice" and all(same_attr(here.attrs[name], whole) for name, whole in _WHOLE.items()):
        return here.operands[0]
    if here.op == "permute":
        inner = call(here.operands[0])
        if inner.op == "permute" and inner.attrs["dims"] == here.attrs["dims"] and _is_swap(here.attrs["dims"]):
            return inner.operands[0]
    return None


def _only_part(node: Node) -> Node | None:
    """The one part of a cat that is not empty: partial rotary embedding passes on what may be nothing."""
    parts = [part for part in call(node).operands if not known_equal(value(part).numel(), 0)]
    alike = len(parts) == 1 and value(parts[0]).dtype == value(node).dtype and same_shape(value(parts[0]), value(node))
    return parts[0] if alike else None


def _is_swap(dims: tuple[int, ...]) -> bool:
    """Whether a permutation undoes itself."""
    return all(dims[d] == i - len(dims) for i, d in enumerate(dims))
