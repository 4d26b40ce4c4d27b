"""The op in the place of the nodes of a site."""

import math

import torch
from torch.fx import Node
from torch.fx.node import Argument

from atomc import ops
from atomc.graph.canonical import Attr, call, only_reader, value
from atomc.graph.edit import insert, nodes_between
from atomc.graph.provenance import inherited
from atomc.graph.sizes import same_sizes
from atomc.graph.strides import same_strides
from atomc.passes.recognize.attention.heads import Shape, reshape, tokens_first
from atomc.passes.recognize.attention.mask_argument import sum_of_masks, visible_keys
from atomc.passes.recognize.attention.match_site import AttentionSite
from atomc.rewriting.rewrite import Fired


def replace_by_op(site: AttentionSite, moved: list[tuple[Node, torch.Tensor]]) -> Fired:
    """Let the readers of a site read the op. A result with new strides is added to `moved`, with
    its value before.
    """
    walk, result, before = site.walk, site.result, site.result.prev
    q, k, v = tokens_first(site)
    band = visible_keys(site)
    mask = sum_of_masks(site) if band is None else None
    window = 0 if band is None or band.low == -math.inf else int(1 - band.low)
    causal = band is not None and band.high == 0
    special: dict[str, int | float] = {"window": window} if window else {}
    special |= {"softcap": walk.softcap} if walk.softcap else {}
    optional: list[Argument] = [None, mask, walk.sinks]
    while optional and optional[-1] is None:
        optional.pop()
    overload = ops.attention.overload
    out = insert(result, overload, q, k, v, *optional, scale=walk.scale, causal=causal, **special)
    back = insert(result, torch.ops.aten.transpose.int, out, -3, -2)
    old = _viewed_result(result, value(back).shape)
    if old is result:
        back = reshape(result, back, value(result).shape)
    new_nodes = nodes_between(before, result)
    consumed = tuple(call(node).op for node in walk.inside)
    meta = inherited(walk.inside, result, "attention", consumed)
    for node in new_nodes:
        node.meta.update(meta)
    old.replace_all_uses_with(back)
    if not same_strides(value(back), value(old)):
        moved.append((back, value(old)))
    attrs: dict[str, Attr] = {"causal": causal, "mask": mask is not None, **special}
    attrs |= {"sinks": True} if walk.sinks is not None else {}
    return Fired("attention", result, attrs, set(walk.inside), new_nodes, consumed)


def _viewed_result(result: Node, shape: Shape) -> Node:
    """The only reader of the product, if it is a view of this shape; else the product."""
    reader = only_reader(result)
    if reader is None or call(reader).op != "view" or not same_sizes(value(reader).shape, shape):
        return result
    return reader
