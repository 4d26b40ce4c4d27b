"""The masks on the way from the softmax to the product: added, filled in, or chosen by `where`."""

import torch
from torch.fx import Node

from atomc.graph.canonical import Attr, call, value
from atomc.graph.edit import insert
from atomc.graph.provenance import describe
from atomc.passes.recognize.attention.causal_mask import constant
from atomc.passes.recognize.attention.products import has_product
from atomc.passes.recognize.attention.walk import Added, Walk
from atomc.rewriting.matching.pattern import Unlike

# A float mask hides a key with any value up to this one: exp() of it is zero beside any score.
HIDES = -1e38


def strip_mask(walk: Walk, node: Node, factor: float) -> Node:
    """The scores below a mask, which is noted. factor: of the scores after the mask."""
    here = call(node)
    if here.op == "add" and len(here.operands) == 2 and here.attrs.get("alpha", 1) == 1:
        return _strip_added(walk, node, factor)
    if here.op == "masked_fill":
        scores, mask, *filled = here.operands
        fill = constant(filled[0]) if filled else _number(here.attrs.get("value"))
    elif here.op == "where" and len(here.operands) == 3:
        mask, then, other = here.operands
        filled_first = constant(then) is not None
        if not filled_first:
            mask = insert(node, torch.ops.aten.logical_not.default, mask)
        scores, fill = (other, constant(then)) if filled_first else (then, constant(other))
    else:
        raise Unlike("extra op", "scale, softcap or mask", describe(node), node)
    limit = max(torch.finfo(value(node).dtype).min / 2, HIDES)
    if fill is None or not fill <= limit or factor < 0:
        hides = f"a mask that fills with {limit:.1e} or less"
        raise Unlike("scalar", hides, f"{fill} in {describe(node)}", node)
    add_mask(walk, Added(mask, node, fill=fill))
    return scores


def _strip_added(walk: Walk, node: Node, factor: float) -> Node:
    operands = call(node).operands
    products = [operand for operand in operands if has_product(operand)]
    if len(products) != 1:
        raise Unlike("other op", "one product of queries and keys", describe(node), node)
    mask = operands[operands[0] is products[0]]
    if not value(mask).is_floating_point():
        raise Unlike("dtype", "a float mask", f"{value(mask).dtype} added", node)
    add_mask(walk, Added(mask, node, factor))
    return products[0]


def _number(attr: Attr) -> float | None:
    return float(attr) if isinstance(attr, int | float) else None


def add_mask(walk: Walk, added: Added) -> None:
    """Note a mask. The op knows none inside the softcap."""
    if walk.softcap:
        raise Unlike("other op", "masks after the softcap", describe(added.at), added.at)
    walk.added.append(added)
