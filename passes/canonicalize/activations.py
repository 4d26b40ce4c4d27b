"""One spelling of the activation of a gate.

x * sigmoid(x), x / (1 + exp(-x))                       =>    silu(x)
x / 2 * (1 + erf(x / sqrt(2)))                          =>    gelu(x)
x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3)))   =>    gelu(x, approximate="tanh")
round(silu(to_fp32(x))), the same with gelu             =>    silu(x)

GELU may be written with its factors and terms in any order, because its parts are compared as
polynomials. In fp32 the last bits may differ. In 16 bits the spellings round in between, and are
left as they are if roundings are kept; the last line is exact.
"""

import math
from collections.abc import Callable

import torch
from torch.fx import Graph, Node

from atomc.graph.canonical import Call, call, only_reader, uncast, value
from atomc.graph.edit import insert
from atomc.graph.variable_float import VariableFloat
from atomc.ops.formats import HALVES

aten = torch.ops.aten
# (power of x, power of the tanh or erf) -> coefficient.
Polynomial = dict[tuple[int, int], float]
_HALF_TIMES_ONE_PLUS: Polynomial = {(1, 0): 0.5, (1, 1): 0.5}
_INSIDE: dict[str, tuple[str, Polynomial]] = {
    "tanh": (
        "tanh",
        {(1, 0): math.sqrt(2 / math.pi), (3, 0): 0.044715 * math.sqrt(2 / math.pi)},
    ),
    "erf": ("none", {(1, 0): math.sqrt(0.5)}),
}


def one_activation(graph: Graph, keep_roundings: bool) -> list[Node]:
    """Change every activation whose result is multiplied. Returns what was replaced."""
    dtypes = (torch.float32,) if keep_roundings else (torch.float32, *HALVES)
    changed = []
    for node in list(graph.nodes):
        activation = _activation(node)
        if activation is None or value(node).dtype not in dtypes:
            continue
        result, x, approximate = activation
        result, x = _strip_casts(result, x)
        if result is node and call(node).op in ("silu", "gelu"):
            continue
        if not _is_gate(result):
            continue
        changed.append(result)
        if approximate is None:
            new = insert(result, aten.silu.default, x)
        else:
            new = insert(result, aten.gelu.default, x, approximate=approximate)
        result.replace_all_uses_with(new)
    return changed


# How many ops deep a polynomial may be.
_DEEPEST = 6
# The result of an activation, what it is computed from, and the approximation of a GELU.
_Found = tuple[Node, Node, str | None]


def _activation(node: Node) -> _Found | None:
    """The activation of which a node is the characteristic part."""
    here = call(node)
    if here.op == "silu":
        return node, here.operands[0], None
    if here.op == "gelu":
        return node, here.operands[0], str(here.attrs.get("approximate", "none"))
    if here.op == "sigmoid":
        return _sigmoid_product(node, here.operands[0])
    if here.op == "exp":
        return _exp_quotient(node)
    if here.op in _INSIDE:
        return _gelu(node)
    return None


def _sigmoid_product(sigmoid: Node, x: Node) -> _Found | None:
    """x * sigmoid(x)"""
    product = only_reader(sigmoid)
    if product is None or call(product).op != "mul" or set(call(product).operands) != {x, sigmoid}:
        return None
    return product, x, None


def _exp_quotient(exp: Node) -> _Found | None:
    """x / (1 + exp(-x)), or x * (1 / (1 + exp(-x)))"""
    [negative] = call(exp).operands
    below = only_reader(exp)
    if (
        call(negative).op != "neg"
        or below is None
        or polynomial(below, {exp: (1, 0)}) != {(0, 0): 1.0, (1, 0): 1.0}
    ):
        return None
    [x], quotient = call(negative).operands, only_reader(below)
    if quotient is None:
        return None
    if call(quotient).op == "reciprocal":
        return _sigmoid_product(quotient, x)
    return (quotient, x, None) if _is_quotient(quotient, x, below) else None


def _is_quotient(node: Node, above: Node, below: Node) -> bool:
    here = call(node)
    return here.op == "div" and here.operands == [above, below] and len(here.attrs) == 0


def _gelu(node: Node) -> _Found | None:
    """The whole GELU around an erf or a tanh."""
    approximate, inside = _INSIDE[call(node).op]
    [operand] = call(node).operands
    x = next(
        (x for x in _upstream(operand) if _same(polynomial(operand, {x: (1, 0)}), inside)), None
    )
    if x is None:
        return None
    part = node
    while (around := only_reader(part)) is not None:
        part, factors = around, polynomial(around, {x: (1, 0), node: (0, 1)})
        if factors is None:
            return None
        if _same(factors, _HALF_TIMES_ONE_PLUS):
            return part, x, approximate
    return None


def _upstream(node: Node) -> list[Node]:
    """The values from which a node may be computed as a polynomial, the nearest first."""
    nodes, reached = [node], [node]
    for _ in range(_DEEPEST):
        above = [node for node in reached if call(node).op in _TERMS]
        reached = list(dict.fromkeys(part for each in above for part in call(each).operands))
        nodes += reached
    return list(dict.fromkeys(nodes))


def polynomial(
    node: Node, variables: dict[Node, tuple[int, int]], depth: int = _DEEPEST
) -> Polynomial | None:
    """A node as a polynomial in these nodes, all in one dtype, or None."""
    if node in variables:
        return {variables[node]: 1.0}
    here = call(node)
    if here.op not in _TERMS or "rounding_mode" in here.attrs or not depth:
        return None
    terms = []
    for operand in here.operands:
        part = polynomial(operand, variables, depth - 1)
        if part is None or value(operand).dtype != value(node).dtype:
            return None
        terms.append(part)
    other = here.attrs.get("other")
    if isinstance(other, int | float) and not isinstance(other, VariableFloat):
        terms.append({(0, 0): float(other)})
    count, combined = _TERMS[here.op]
    return combined(terms, here) if len(terms) == count else None


def _add(terms: list[Polynomial], here: Call) -> Polynomial | None:
    (first, second), alpha = terms, here.attrs.get("alpha", 1)
    if not isinstance(alpha, int | float):
        return None
    scale = -alpha if here.op == "sub" else alpha
    return {at: first.get(at, 0.0) + scale * second.get(at, 0.0) for at in (first.keys() | second)}


def _mul(first: Polynomial, second: Polynomial) -> Polynomial:
    product: Polynomial = {}
    for (i, j), a in first.items():
        for (k, n), b in second.items():
            product[i + k, j + n] = product.get((i + k, j + n), 0.0) + a * b
    return product


def _div(terms: list[Polynomial], here: Call) -> Polynomial | None:
    above, below = terms
    by = below.get((0, 0), 0.0)
    return _mul(above, {(0, 0): 1 / by}) if len(below) == 1 and by else None


def _pow(terms: list[Polynomial], here: Call) -> Polynomial | None:
    [base], exponent = terms, here.attrs.get("exponent")
    return _mul(_mul(base, base), base) if exponent == 3 else None


# Op -> the number of its terms, and how they are combined. A second power is a square.
_TERMS: dict[str, tuple[int, Callable[[list[Polynomial], Call], Polynomial | None]]] = {
    "add": (2, _add),
    "sub": (2, _add),
    "mul": (2, lambda terms, here: _mul(terms[0], terms[1])),
    "div": (2, _div),
    "pow": (1, _pow),
    "square": (1, lambda terms, here: _mul(terms[0], terms[0])),
    "neg": (1, lambda terms, here: _mul(terms[0], {(0, 0): -1.0})),
}


def _same(polynomial: Polynomial | None, wanted: Polynomial) -> bool:
    """Whether all coefficients are equal, to the digits that models write."""
    if polynomial is None:
        return False
    powers = {*polynomial, *wanted}
    return all(
        math.isclose(polynomial.get(at, 0), wanted.get(at, 0), rel_tol=1e-6) for at in powers
    )


def _strip_casts(result: Node, x: Node) -> tuple[Node, Node]:
    """Without the cast of x to fp32 and that of the result back."""
    narrow, back = uncast(x), only_reader(result)
    if narrow is None or back is None or call(back).op != "cast":
        return result, x
    return (back, narrow) if value(back).dtype == value(narrow).dtype else (result, x)


def _is_gate(node: Node) -> bool:
    """Whether another tensor multiplies it."""
    return any(
        call(reader).op == "mul" and len(call(reader).operands) == 2 for reader in node.users
    )
