"""Symbolic sizes as sympy expressions, compared and substituted without adding guards."""

from collections.abc import Mapping
from typing import TypeVar

import sympy
import torch

from atomc.torch_compat.tracing import statically_known_true

Size = int | torch.SymInt
T = TypeVar("T")


def expression(size: Size | sympy.Expr) -> sympy.Expr:
    """The sympy expression of a size."""
    return size.node.expr if isinstance(size, torch.SymInt) else sympy.sympify(size)


def always_equal(a: Size | sympy.Expr, b: Size | sympy.Expr) -> bool:
    """True only if a == b for every value of their symbols."""
    if isinstance(a, Size) and isinstance(b, Size):
        return bool(statically_known_true(a == b))
    return bool(sympy.expand(expression(a) - expression(b)) == 0)


def known_different(a: Size | sympy.Expr, b: Size | sympy.Expr) -> bool:
    """True only if a != b for every value of their symbols."""
    difference = sympy.expand(expression(a) - expression(b))
    return bool(difference.is_number and difference != 0)


def substitute(size: T, values: Mapping[sympy.Symbol, Size | sympy.Expr]) -> T | sympy.Expr:
    """The size with symbols replaced by other sizes, as an expression; an int stays an int.

    All at once: the symbols of a pattern and of a graph may have the same names.
    """
    if not isinstance(size, torch.SymInt):
        return size
    return expression(size).xreplace(
        {symbol: expression(value) for symbol, value in values.items()}
    )
