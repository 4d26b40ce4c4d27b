"""From the softmax downstream to the product of the weights with the values, and upstream to the
product of queries and keys.
"""

import math
from typing import TypeGuard

from torch.fx import Node

from atomc.graph.canonical import Attr, call, factor, only_reader, readers, spell, value
from atomc.graph.provenance import describe
from atomc.ops.formats import FLOATS
from atomc.passes.recognize.attention.masks import add_mask, strip_mask
from atomc.passes.recognize.attention.products import LAYOUT, PRODUCTS, moves_ones
from atomc.passes.recognize.attention.sinks import strip_sinks
from atomc.passes.recognize.attention.walk import Added, Walk
from atomc.rewriting.matching.pattern import Unlike


def product_with_values(walk: Walk) -> Node:
    """The product of the weights with the values. On the way, a slice may drop the weights of the
    sinks.
    """
    node = walk.softmax
    if call(node).attrs["dim"] != -1:
        raise Unlike("attribute", "softmax over keys", spell(node), node)
    while True:
        walk.inside.append(node)
        reader = _reader(node)
        here = call(reader)
        if here.op in PRODUCTS:
            break
        if here.op not in (*LAYOUT, "cast", "permute", "slice"):
            raise Unlike("extra op", "weights times values", describe(reader), reader)
        if here.op == "permute" and not moves_ones(reader):
            raise Unlike("view", "weights [.., N, T, S]", spell(reader), reader)
        node = reader
    if here.op == "baddbmm" or here.operands[0] is not node:
        raise Unlike("operand order", "weights @ values", describe(reader), reader)
    walk.inside.append(reader)
    return reader


def _reader(node: Node) -> Node:
    reader = only_reader(node)
    if reader is not None and reader.op != "output":
        return reader
    if any(reader.op == "output" for reader in readers(node)):
        expected = f"no other reader of {describe(node)}"
        raise Unlike("extra user", expected, "the graph returns it", node)
    names = " and ".join(map(describe, readers(node))) or "none"
    raise Unlike("extra user", f"one reader of {describe(node)}", names, node)


def product_with_keys(walk: Walk) -> Node:
    """The product of queries and keys. On the way: scale, softcap, masks and sinks, outermost
    first.
    """
    scale, node = 1.0, strip_sinks(walk)
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
            node = strip_mask(walk, node, scale)
    walk.inside.append(node)
    if call(node).op == "baddbmm":
        scale *= _baddbmm_factor(walk, node, scale)
    walk.scale = scale * (walk.softcap or 1.0)
    return node


def _is_factor(attr: Attr) -> TypeGuard[float]:
    return isinstance(attr, int | float) and math.isfinite(attr) and attr != 0


def _baddbmm_factor(walk: Walk, node: Node, scale: float) -> float:
    """The factor of the product in a baddbmm, whose first operand is a mask."""
    here = call(node)
    beta, alpha = here.attrs.get("beta", 1), here.attrs.get("alpha", 1)
    if not _is_factor(alpha) or not (beta == 0 or _is_factor(beta)):
        raise Unlike("scalar", "constant alpha and beta", spell(node), node)
    if _is_factor(beta):
        add_mask(walk, Added(here.operands[0], node, scale * beta))
    return alpha
