"""Gives pieces of a graph the sizes that the shapes of their inputs are computed from."""

from collections.abc import Iterator

import sympy
from torch import SymInt, Tensor
from torch.fx import GraphModule, Node


def bind_sizes(whole: GraphModule, piece: GraphModule, call: Node) -> None:
    """Add inputs to a piece, which `call` calls in the graph `whole`, for sizes that only appear in
    expressions, such as T in an input [2 * T, H] or in a number T + 2: Inductor reads each size
    from an input that has it. An input is a tensor, because tracing gives a size without a hint
    another name.
    """
    inputs = list(piece.graph.find_nodes(op="placeholder"))
    numbers = [node.meta["val"] for node in inputs if isinstance(node.meta.get("val"), SymInt)]
    sizes = [*numbers, *(size for node in inputs for size in _sizes(node))]
    known = {size.node.expr for size in sizes if isinstance(size.node.expr, sympy.Symbol)}
    missing = {symbol for size in sizes for symbol in size.node.expr.free_symbols} - known
    if not missing:
        return
    for symbol in sorted(missing, key=str):
        source = _source(whole, symbol)
        if source is None:  # then Inductor says what it lacks
            continue
        with piece.graph.inserting_after(inputs[-1]):
            added = piece.graph.placeholder(f"has_{symbol}")
        added.meta["val"] = source.meta["val"]
        inputs.append(added)
        call.args = (*call.args, source)
    piece.recompile()
    whole.recompile()


def _source(whole: GraphModule, symbol: sympy.Symbol) -> Node | None:
    """An input of the graph that has this size."""
    inputs: list[Node] = list(whole.graph.find_nodes(op="placeholder"))
    return next(
        (node for node in inputs if any(size.node.expr == symbol for size in _sizes(node))), None
    )


def _sizes(node: Node) -> Iterator[SymInt]:
    value = node.meta.get("val")
    if isinstance(value, Tensor):
        yield from (n for n in (*value.shape, *value.stride()) if isinstance(n, SymInt))
