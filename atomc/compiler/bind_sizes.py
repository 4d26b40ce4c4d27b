"""Gives pieces of a graph the sizes that the shapes of their inputs are computed from."""

from collections.abc import Iterator, Mapping

import sympy
import torch
from torch import SymInt, Tensor
from torch.fx import GraphModule, Node


def bind_sizes(whole: GraphModule, piece: GraphModule, call: Node) -> None:
    """Add the sizes that only appear in expressions, such as T in an input [2 * T, H], to the
    inputs of a piece, which `call` calls in the graph `whole`: Inductor reads each from an input.
    """
    inputs = list(piece.graph.find_nodes(op="placeholder"))
    sizes = [size for node in inputs for size in _sizes(node)]
    known = {size.node.expr for size in sizes if isinstance(size.node.expr, sympy.Symbol)}
    missing = {symbol for size in sizes for symbol in size.node.expr.free_symbols} - known
    for symbol in sorted(missing, key=str):
        source = _source(whole, symbol)
        if source is None:  # then Inductor says what it lacks
            continue
        with piece.graph.inserting_after(inputs[-1]):
            added = piece.graph.placeholder(str(symbol))
        added.meta["val"] = source.meta["val"]
        inputs.append(added)
        call.args = (*call.args, source)
    piece.recompile()


def _source(whole: GraphModule, symbol: sympy.Symbol) -> Node | None:
    """A node with this size, from the inputs of the graph."""
    inputs: list[Node] = list(whole.graph.find_nodes(op="placeholder"))
    for node in inputs:
        value = node.meta.get("val")
        if isinstance(value, SymInt) and value.node.expr == symbol:
            return node
    for node in inputs:
        for dim, size in _dims(node).items():
            if size.node.expr == symbol:
                return _size_of(whole, node, dim, size)
    return None


def _size_of(whole: GraphModule, node: Node, dim: int, size: SymInt) -> Node:
    for user in node.users:
        if user.target is torch.ops.aten.sym_size.int and user.args == (node, dim):
            return user
    *_, last = whole.graph.find_nodes(op="placeholder")
    with whole.graph.inserting_after(last):
        found = whole.graph.call_function(torch.ops.aten.sym_size.int, (node, dim))
    found.meta["val"] = size
    return found


def _sizes(node: Node) -> Iterator[SymInt]:
    value = node.meta.get("val")
    if isinstance(value, SymInt):
        yield value
    elif isinstance(value, Tensor):
        yield from (n for n in (*value.shape, *value.stride()) if isinstance(n, SymInt))


def _dims(node: Node) -> Mapping[int, SymInt]:
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        return {}
    sizes: list[int | SymInt] = list(value.shape)
    return {dim: n for dim, n in enumerate(sizes) if isinstance(n, SymInt)}
