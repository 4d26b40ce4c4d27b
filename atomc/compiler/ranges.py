"""Token ranges: kernels declare where they are meant to be used, and a graph is lowered once per
range that results.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

import sympy
import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from atomc.cache.compiled import Dispatch
from atomc.graph.canonical import value
from atomc.graph.expressions import expression
from atomc.ops.op import op_of
from atomc.token_range import ALL_TOKENS, Tokens
from atomc.torch_compat.tracing import bounds


def token_expression(gm: GraphModule) -> sympy.Expr | None:
    """The number of tokens the graph works on, in its symbols, by the first op that says which rows
    they are; or None.
    """
    for node in gm.graph.nodes:
        op = op_of(node.target)
        if op is not None and op.rows is not None:
            rows = value(op.bind(*node.args, **node.kwargs)[op.rows])
            return sympy.Mul(*[expression(size) for size in rows.shape[:-1]])
    return None


def ranges_of(gm: GraphModule, could_serve: Callable[[Node], Sequence[Tokens]]) -> list[Tokens]:
    """The ranges of token counts that the kernels which could serve tell apart, and that a call can
    have.

    A static graph has one. Dynamo's dynamic sizes are 2 at least: a size of 1 is a graph of its
    own.
    """
    tokens = token_expression(gm)
    if tokens is None:
        return [ALL_TOKENS]
    least, most = (
        (max(1, int(tokens)),) * 2 if tokens.is_number else bounds(gm.graph, tokens)
    )  # without tokens as with one
    declared = {
        meant for node in gm.graph.nodes if op_of(node.target) for meant in could_serve(node)
    }
    return [
        span
        for span in _told_apart(declared)
        if (span.last is None or least <= span.last) and (most is None or span.first <= most)
    ]


def _told_apart(declared: Iterable[Tokens]) -> list[Tokens]:
    """All token counts, cut wherever one of these ranges starts or ends."""
    starts = {1}
    for span in declared:
        starts |= {span.first} if span.last is None else {span.first, span.last + 1}
    borders = sorted(starts)
    return [*(Tokens(a, b - 1) for a, b in pairwise(borders)), Tokens(borders[-1])]


def dispatch(gm: GraphModule, ranges: Sequence[Tokens]) -> Dispatch | None:
    """How to choose among these ranges; None if there is but one."""
    if len(ranges) == 1:
        return None
    tokens = token_expression(gm)
    assert tokens is not None
    symbols = sorted(tokens.free_symbols, key=str)
    starts = tuple(span.first for span in ranges)
    return Dispatch(
        starts,
        tuple(map(str, symbols)),
        tuple(_where(gm, symbol) for symbol in symbols),
        sympy.pycode(tokens),
    )


def _where(gm: GraphModule, symbol: sympy.Symbol) -> tuple[int, int | None]:
    """The input that tells a symbol's value: (number, None) for a size, (number, dimension) for a
    tensor.
    """
    inputs: list[Node] = gm.graph.find_nodes(op="placeholder")
    for i, node in enumerate(inputs):
        if isinstance(value(node), torch.SymInt) and expression(value(node)) == symbol:
            return i, None
    for i, node in enumerate(inputs):
        if isinstance(value(node), Tensor):
            for dim, size in enumerate(value(node).shape):
                if isinstance(size, torch.SymInt) and expression(size) == symbol:
                    return i, dim
    raise ValueError(f"no input of the graph tells the size {symbol}")
