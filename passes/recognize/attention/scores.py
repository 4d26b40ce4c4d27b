"""Upstream: from the softmax to the product of queries and keys."""

import math
from typing import TypeGuard

from torch.fx import Node

from atomc.graph.canonical import Attr, call, factor, spell, value
from atomc.graph.provenance import describe
from atomc.ops.formats import FLOATS
from atomc.passes.recognize.attention.masks import add_mask, without_mask
from atomc.passes.recognize.attention.products import LAYOUT, PRODUCTS, moves_ones
from atomc.passes.recognize.attention.sinks import without_sinks
from atomc.passes.recognize.attention.walk import Added, Unlike, Walk


def product_with_keys(walk: Walk) -> Node:
    """The product of queries and keys. On the way: scale, softcap, masks and sinks, outermost
    first.
    """
    scale, node = 1.0, without_sinks(walk)
    while call(node).op not in PRODUCTS:
        walk.inside.append(node)
        here, by = call(node), factor(node)
        plain = here.op == "cast" and value(node).dtype in FLOATS
        if plain or here.op in LAYOUT or (here.op == "permute" and moves_ones(node)):
            node = here.operands[0]
        elif _is_factor(by):
            scale, node = scale * by, here.operands[0]
        elif here.op == "tanh":
            if walk.softcap or scale <= 0:
                raise Unlike("other op", "one softcap", describe(node), node)
            walk.softcap, scale, node = scale, 1.0, here.operands[0]
        else:
            node = without_mask(walk, node, scale)
    walk.inside.append(node)
    if call(node).op == "baddbmm":
        scale *= _of_baddbmm(walk, node, scale)
    walk.scale = scale * (walk.softcap or 1.0)
    return node


def _is_factor(attr: Attr) -> TypeGuard[float]:
    return isinstance(attr, int | float) and math.isfinite(attr) and attr != 0


def _of_baddbmm(walk: Walk, node: Node, scale: float) -> float:
    """The factor of the product in a baddbmm, whose first operand is a mask."""
    here = call(node)
    beta, alpha = here.attrs.get("beta", 1), here.attrs.get("alpha", 1)
    if not _is_factor(alpha) or not (beta == 0 or _is_factor(beta)):
        raise Unlike("scalar", "constant alpha and beta", spell(node), node)
    if _is_factor(beta):
        add_mask(walk, Added(here.operands[0], node, scale * beta))
    return alpha
