"""A score for how similar the operands of a graph node are to those of a pattern node, used to
choose between candidates.
"""

from collections.abc import Mapping

import sympy
import torch
from torch import Tensor
from torch.fx import Node

from atomc.graph.canonical import COMMUTATIVE, Attr, Call, Capture, call, value
from atomc.graph.expressions import Size, expression, substitute
from atomc.graph.sizes import known_equal
from atomc.rewriting.matching.attributes import same_attr
from atomc.rewriting.matching.pattern import MatchSite

# The same op scores 1, equal attributes up to EQUAL_ATTRS more; operands are added down to DEPTH.
DEPTH = 3
EQUAL_ATTRS = 0.5
PLACED_HERE = 1.0
PLACED_ELSEWHERE = -0.5
UNBOUND_INPUT = 0.1  # any node may be an input, but an operand of the same op is better


def similarity(site: MatchSite, p: Node, g: Node, depth: int = DEPTH) -> float:
    """The similarity of g and p, given the nodes that are matched already."""
    counterpart = site.bound.get(site.pattern.inputs[p]) if p in site.pattern.inputs else site.at(p)
    if counterpart is not None:
        return PLACED_HERE if counterpart is g else PLACED_ELSEWHERE
    if p in site.pattern.inputs:
        return UNBOUND_INPUT
    wanted, here = call(p), call(g)
    if wanted.op != here.op:
        return (
            similarity(site, wanted.operands[0], g, depth) if wanted.op == "cast" and depth else 0.0
        )
    score = 1.0 + EQUAL_ATTRS * _equal_attrs(wanted, here)
    if depth and wanted.operands:
        score += max(
            sum(
                similarity(site, q, h, depth - 1)
                for q, h in zip(wanted.operands, order, strict=False)
            )
            for order in here.orders()
        )
    return score


def alike(p: Node, g: Node) -> bool:
    """False if one multiplies (or adds, ...) two tensors, and the other a tensor and a number."""
    return call(p).op not in COMMUTATIVE or len(call(p).operands) == len(call(g).operands)


def like(site: MatchSite, p: Node, g: Node) -> bool:
    """Whether both are the same op, and casts to the same dtype."""
    wanted, here = call(p), call(g)
    dtype = wanted.attrs.get("dtype")
    same_cast = (
        wanted.op != "cast"
        or isinstance(dtype, Capture)
        or site.attr(dtype) == here.attrs.get("dtype")
    )
    return wanted.op == here.op and same_cast and alike(p, g)


def _equal_attrs(wanted: Call, here: Call) -> float:
    """The fraction of constant attributes that are equal, with sizes taken from the operands."""
    constant = {
        name: attr for name, attr in wanted.attrs.items() if not isinstance(attr, Capture | tuple)
    }
    symbolic = any(isinstance(attr, torch.SymInt) for attr in constant.values())
    sizes = _sizes(wanted, here) if symbolic else {}
    equal = [_equal(attr, here.attrs.get(name), sizes) for name, attr in constant.items()]
    return sum(equal) / len(equal) if equal else 1.0


def _equal(attr: Attr, actual: Attr, sizes: Mapping[sympy.Symbol, Size]) -> bool:
    if isinstance(attr, torch.SymInt):
        return actual is not None and known_equal(substitute(attr, sizes), actual)
    return same_attr(attr, actual)


def _sizes(wanted: Call, here: Call) -> dict[sympy.Symbol, Size]:
    """The sizes here for the symbols of the pattern's operands."""
    tensors = [(value(q), value(h)) for q, h in zip(wanted.operands, here.operands, strict=False)]
    return {
        expression(a): b
        for q, h in tensors
        if isinstance(q, Tensor) and isinstance(h, Tensor)
        for a, b in zip(reversed(q.shape), reversed(h.shape), strict=False)
        if isinstance(a, torch.SymInt)
    }
