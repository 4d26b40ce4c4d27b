"""Gives pieces of a graph the sizes that their inputs and numbers are computed from."""

from collections.abc import Iterator

import sympy
from torch import SymBool, SymFloat, SymInt, Tensor
from torch.fx import Graph, GraphModule, Node

from atomc.graph.node_record import record_of


def copy_numbers(graph: Graph, piece_of: dict[Node, int]) -> None:
    """Compute each number, such as T + 2, in every piece of glue that reads it, from T itself.
    `piece_of` gets the copies.

    An input T + 2 would make Inductor check its cache against a name that is not in the piece: a
    KeyError, from the second process on.
    """
    copies: dict[tuple[Node, int], Node] = {}

    def copied(node: Node, piece: int) -> Node:
        if not _is_computed(node) or piece_of[node] == piece:
            return node
        if (node, piece) not in copies:
            copy = graph.node_copy(node, lambda source: copied(source, piece))
            piece_of[copy], copies[node, piece] = piece, copy
        return copies[node, piece]

    for reader in list(piece_of):
        if not record_of(reader).kernel:
            with graph.inserting_before(reader):
                for node in reader.all_input_nodes:
                    reader.replace_input_with(node, copied(node, piece_of[reader]))
    for node in reversed(list(piece_of)):
        if _is_computed(node) and not node.users:
            del piece_of[node]
            graph.erase_node(node)


def _is_computed(node: Node) -> bool:
    """Whether a node computes a number that is more than one size."""
    value = node.meta.get("val")
    return (
        node.op == "call_function"
        and isinstance(value, SymInt | SymFloat | SymBool)
        and not isinstance(value.node.expr, sympy.Symbol)
    )


def bind_sizes(split: GraphModule, piece: GraphModule, call: Node) -> None:
    """Add inputs to a piece, which `call` calls in the graph `split`, for sizes that only appear in
    expressions, such as T in an input [2 * T, H]: Inductor reads each size from an input that has
    it. An input is a tensor, because tracing gives a size without a hint another name.
    """
    inputs = list(piece.graph.find_nodes(op="placeholder"))
    sizes = [size for node in inputs for size in _sizes(node)]
    bound = {size.node.expr for size in sizes if isinstance(size.node.expr, sympy.Symbol)}
    missing = {symbol for size in sizes for symbol in size.node.expr.free_symbols} - bound
    if not missing:
        return
    for symbol in sorted(missing, key=str):
        source = _source(split, symbol)
        if source is None:  # then Inductor says what it lacks
            continue
        with piece.graph.inserting_after(inputs[-1]):
            added = piece.graph.placeholder(f"has_{symbol}")
        added.meta["val"] = source.meta["val"]
        inputs.append(added)
        call.args = (*call.args, source)
    piece.recompile()
    split.recompile()


def _source(split: GraphModule, symbol: sympy.Symbol) -> Node | None:
    """An input of the graph that has this size."""
    inputs: list[Node] = list(split.graph.find_nodes(op="placeholder"))
    return next(
        (node for node in inputs if any(size.node.expr == symbol for size in _sizes(node))), None
    )


def _sizes(node: Node) -> Iterator[SymInt]:
    value = node.meta.get("val")
    if isinstance(value, Tensor):
        yield from (n for n in (*value.shape, *value.stride()) if isinstance(n, SymInt))
