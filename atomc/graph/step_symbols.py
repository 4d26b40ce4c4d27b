"""Symbols for the sizes of a step, and which symbol of a graph is which.

T tokens of the step, R rows of logits, S sequences, C tokens of context of a sequence, including
the new ones, N processes of a group.
"""

import sympy
from torch import Tensor
from torch.fx import Graph

from atomc.graph.canonical import value
from atomc.graph.expressions import Size, expression
from atomc.graph.node_record import step_input
from atomc.ops.inputs import StepInput

T, R, S, C, N = sympy.symbols("T R S C N", positive=True, integer=True)


def symbols_of(graph: Graph) -> dict[sympy.Symbol, sympy.Expr]:
    """Symbol of the graph -> T, R or S, for those that the inputs of the step identify."""
    symbols: dict[sympy.Symbol, sympy.Expr] = {}
    for node in graph.find_nodes(op="placeholder"):
        shape = list(value(node).shape) if isinstance(value(node), Tensor) else []
        match step_input(node):
            case StepInput("input_ids" | "positions", dim=None) if len(shape) == 1:
                _name(symbols, shape[0], T)
            case StepInput("input_ids", dim=None) if (
                len(shape) == 2
            ):  # [batch, tokens]: the step has batch * tokens tokens
                _name(symbols, shape[0], S)
                if isinstance(shape[0], int) and shape[0] == 1:
                    _name(symbols, shape[1], T)
            case StepInput("logits_rows", dim=None):
                _name(symbols, shape[0], R)
            case StepInput("seq_lens"):
                _name(symbols, shape[0], S)
            case StepInput("slots"):
                _name(symbols, shape[0], T)
    return symbols


def _name(symbols: dict[sympy.Symbol, sympy.Expr], size: Size, symbol: sympy.Symbol) -> None:
    expr = expression(size)
    if isinstance(expr, sympy.Symbol) and symbol not in symbols.values():
        symbols.setdefault(expr, symbol)
