"""Formulas of sizes as trees that a page evaluates, parsed from sympy's text, not executed."""

import ast
import math
import operator
from collections.abc import Callable, Mapping

# A number, the name of a size, or [operation, operands ...]
Tree = int | float | str | list["Tree"]

_BINARY: dict[type[ast.operator], str] = {
    ast.Add: "+",
    ast.Sub: "-",
    ast.Mult: "*",
    ast.Div: "/",
    ast.FloorDiv: "//",
    ast.Mod: "%",
    ast.Pow: "**",
}
_CALLS = {
    "Min": "min",
    "Max": "max",
    "floor": "floor",
    "ceiling": "ceil",
    "Mod": "%",
    "PythonMod": "%",
    "CeilToInt": "ceil",
    "FloorToInt": "floor",
    "TruncToInt": "floor",
    "FloorDiv": "//",
    "CleanDiv": "//",
    "IntTrueDiv": "/",
    "FloatTrueDiv": "/",
    "ToFloat": "+",
}
_OPERATIONS: dict[str, Callable[..., float]] = {
    "+": lambda *x: sum(x),
    "-": lambda a, b=None: -a if b is None else a - b,
    "*": lambda *x: math.prod(x),
    "/": operator.truediv,
    "//": operator.floordiv,
    "%": operator.mod,
    "**": operator.pow,
    "min": min,
    "max": max,
    "floor": math.floor,
    "ceil": math.ceil,
}


def tree(formula: str) -> Tree | None:
    """["+", ["*", 2, "T"], 1] of "2*T + 1"; None for any other text."""
    try:
        return _tree(ast.parse(formula, mode="eval").body)
    except (SyntaxError, ValueError, RecursionError):
        return None


def _tree(node: ast.expr) -> Tree:
    match node:
        case ast.Constant(value=int() | float() as number):
            return number
        case ast.Name(id=name):
            return name
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return ["-", _tree(operand)]
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return [_BINARY[type(op)], _tree(left), _tree(right)]
        case ast.Call(func=ast.Name(id=name), args=args) if name in _CALLS:
            return [_CALLS[name], *map(_tree, args)]
    raise ValueError(f"{ast.unparse(node)!r} is not a formula")


def names_in(tree: Tree | None) -> set[str]:
    """The names of the sizes in a formula."""
    if isinstance(tree, str):
        return {tree}
    return set[str]().union(*map(names_in, tree[1:])) if isinstance(tree, list) else set()


def evaluated(tree: Tree, sizes: Mapping[str, float]) -> float:
    """The value for these sizes. Raises KeyError for a missing size."""
    if isinstance(tree, str):
        return sizes[tree]
    if isinstance(tree, list):
        return _OPERATIONS[str(tree[0])](*(evaluated(part, sizes) for part in tree[1:]))
    return float(tree)
