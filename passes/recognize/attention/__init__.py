"""Replace attention written out in PyTorch by one op.

    q @ k.T > * scale > (tanh: softcap) > (+ masks) > (cat sinks) > softmax > @ v
 =>
    attention(q, k, v, None, mask, sinks, scale=, causal=, softcap=)

The walk starts at each softmax: downstream to the product with the values, upstream to the
product of queries and keys (both_products.py). Both products may be matmul, einsum, bmm or baddbmm;
keys and values may be repeated for groups of queries. Masks that hide exactly the later keys become
`causal`, others are added up.

In 16 bits the model rounds scores and weights, the op only its result; rounding="hf" therefore
keeps the written form. A row whose keys are all hidden by -inf is finite, not NaN.
"""

from collections.abc import Iterator
from functools import partial

import torch
from torch.fx import GraphModule, Node

from atomc.graph.canonical import call
from atomc.graph.strides import Values, spread_strides
from atomc.passes.recognize.attention.both_products import (
    product_with_keys,
    product_with_values,
)
from atomc.passes.recognize.attention.match_site import AttentionSite, checked_site
from atomc.passes.recognize.attention.products import PRODUCTS, derives_from_product, has_product
from atomc.passes.recognize.attention.replacement import replace_by_op
from atomc.passes.recognize.attention.walk import Walk
from atomc.rewriting.graph_pass import Change, Context
from atomc.rewriting.matching.near_miss import NearMiss
from atomc.rewriting.matching.pattern import Difference, Unlike
from atomc.rewriting.rewrite import Fired


def attention(gm: GraphModule, context: Context) -> Iterator[Change | NearMiss]:
    """Replace every softmax between a product of queries and keys and one with values."""
    moved: list[tuple[Node, torch.Tensor]] = []
    for softmax in [node for node in gm.graph.nodes if call(node).op in ("_softmax", "softmax")]:
        walk = Walk(softmax)
        try:
            result = product_with_values(walk)
            site = checked_site(walk, product_with_keys(walk), result, context)
        except Unlike as unlike:
            if _is_near(walk):
                yield _near_miss(walk, unlike.difference)
            continue
        yield Change(softmax, partial(_near_miss, walk), partial(_replaced, site, moved))
        for reason in walk.unproven:
            yield _near_miss(walk, reason, "causal")
    values = Values(gm.graph)
    for node, before in moved:
        spread_strides(gm.graph, node, before, values)


def _replaced(site: AttentionSite, moved: list[tuple[Node, torch.Tensor]]) -> Fired | NearMiss:
    try:
        return replace_by_op(site, moved)
    except Unlike as unlike:
        return _near_miss(site.walk, unlike.difference)


def _is_near(walk: Walk) -> bool:
    """Whether the scores are computed from a product; by whatever ops, if values are weighted."""
    weighted = any(call(node).op in PRODUCTS for node in walk.inside)
    return has_product(walk.softmax) or (weighted and derives_from_product(walk.softmax))


def _near_miss(walk: Walk, difference: Difference, variant: str = "") -> NearMiss:
    nodes = {*walk.inside, walk.softmax}
    edits = int(difference.kind not in ("guard", "off"))
    total = len(nodes) + edits
    return NearMiss(
        "attention", variant, walk.softmax, len(nodes), total, edits, [difference], nodes
    )
