"""Absorb the projections of keys and values into the queries and the result of latent attention,
where no kernel computes keys and values from the cache.

    q_nope, ... > mla_rope_kv_write -+-> q ----> mla_paged_attention
                                     +-> token -+
 =>
    q_nope > linear_by_head, ... > mla_rope_kv_write -+-> q ----> mla_absorbed_attention
                                                      +-> token -+           > linear_by_head

With W_UK and W_UV, the rows of kv_b_proj of a head, q (W_UK c) = (q W_UK) c, and sum_t p_t W_UV c_t
= W_UV sum_t p_t c_t (DeepSeek-V2, section 2.1.2). Both are views of the parameter. Per token the
products cost what keys and values of one token cost; attention then reads a row of the cache once
for all heads, with 2 L + R multiplications a pair of a query and a key, not P + R + V. It runs once
per range of token counts, because kernels for many tokens may serve mla_paged_attention.
"""

import operator
from typing import NamedTuple

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import Argument

from atomc import ops
from atomc.graph.canonical import value
from atomc.graph.edit import infer, insert, replace
from atomc.rewriting.graph_pass import Context
from atomc.rewriting.rewrite import Fired

aten = torch.ops.aten


def absorb(gm: GraphModule, context: Context) -> list[Fired]:
    """Replace each mla_paged_attention that no kernel serves in this range."""
    assert context.serves is not None
    sites = [
        node
        for node in gm.graph.nodes
        if node.target is ops.mla_paged_attention.overload and not context.serves(node)
    ]
    return [_absorbed(node) for node in sites]


class _Halves(NamedTuple):
    """The projections of a head: w_uk [H, L, P], w_uv [H, V, L], views of kv_b_proj."""

    w_uk: Node
    w_uv: Node


def _halves(before: Node, weight: Node, heads: int, nope: int) -> _Halves:
    rows, latent = value(weight).shape
    of_head = insert(before, aten.view.default, weight, [heads, rows // heads, latent])
    w_uk = insert(before, aten.slice.Tensor, of_head, 1, 0, nope)
    w_uv = insert(before, aten.slice.Tensor, of_head, 1, nope, rows // heads)
    return _Halves(insert(before, aten.transpose.int, w_uk, 1, 2), w_uv)


def _absorbed(node: Node) -> Fired:
    given = ops.mla_paged_attention.signature.bind(*node.args, **node.kwargs).arguments
    q, weight, cache = (_node(given.pop(name)) for name in ("q", "weight", "kv_cache"))
    latent = value(weight).shape[-1]
    rotated = value(cache).shape[-1] - latent
    nope = value(q).shape[-1] - rotated
    heads = value(q).shape[-2]
    written = _only_writer(q)
    at = node if written is None else written
    halves = _halves(at, weight, heads, nope)
    if written is not None:
        _project(written, halves.w_uk)
        infer(q)
    else:
        parts = [
            insert(node, aten.slice.Tensor, q, -1, start, end)
            for start, end in ((0, nope), (nope, nope + rotated))
        ]
        parts[0] = insert(node, ops.linear_by_head.overload, parts[0], halves.w_uk)
        q = insert(node, aten.cat.default, parts, -1)
    attended = insert(node, ops.mla_absorbed_attention.overload, q, cache, latent=latent, **given)
    made = insert(node, ops.linear_by_head.overload, attended, halves.w_uv)
    replace(node, made)
    return Fired("absorb", node, {}, {node}, [attended, made])


def _only_writer(q: Node) -> Node | None:
    """The mla_rope_kv_write whose queries only this attention reads, or None."""
    if q.target is not operator.getitem or q.args[1] != 0 or len(q.users) > 1:
        return None
    writer = _node(q.args[0])
    return writer if writer.target is ops.mla_rope_kv_write.overload else None


def _project(writer: Node, w_uk: Node) -> None:
    """Let the queries of a write be projected to the latent space first."""
    q_nope = _node(ops.mla_rope_kv_write.signature.bind(*writer.args, **writer.kwargs).args[0])
    latent = insert(writer, ops.linear_by_head.overload, q_nope, w_uk)
    writer.args = (latent, *writer.args[1:])
    infer(writer)


def _node(given: Argument) -> Node:
    assert isinstance(given, Node)
    return given
