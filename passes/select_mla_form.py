"""Absorb the projections of keys and values into the queries and the result of latent attention,
where no kernel computes keys and values from the cache.

    q_nope, ... > mla_rope_kv_write -+-> q ----> mla_paged_attention
                                     +-> token -+
 =>
    q_nope > linear_by_head, ... > mla_rope_kv_write -+-> q ----> mla_absorbed_attention
                                                      +-> token -+           > linear_by_head

With W_UK and W_UV, the rows of kv_b_proj of a head, q (W_UK c) = (q W_UK) c, and sum_t p_t W_UV c_t
= W_UV sum_t p_t c_t (DeepSeek-V2, section 2.1.2). Both are views of the weight. Per token the
products cost what keys and values of one token cost; attention then reads a row of the cache once
for all heads, with 2 L + R multiplications a pair of a query and a key, not P + R + V. It runs once
per range of token counts, because kernels for many tokens may serve mla_paged_attention.

Where the model multiplies rows in fp8 or MXFP4 by kv_b_proj, the first product is such a one, if a
kernel of bmm_rope_kv_write (passes/fuse/bmm_kv_write.py) serves it:

    q_nope > quantizer > bmm -+- mla_rope_kv_write
    kv_b_keys ----------------+
"""

import operator
from typing import NamedTuple

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import Argument

from atomc import ops
from atomc.graph.canonical import value
from atomc.graph.edit import infer, insert, replace
from atomc.graph.op_call import arguments_of
from atomc.ops.mla import BMM_SCHEMES
from atomc.passes.bind_state import fp8_of
from atomc.rewriting.graph_pass import Context, Outcome
from atomc.rewriting.rewrite import Fired

aten = torch.ops.aten
MXFP4_GROUP = 32


def select_mla_form(gm: GraphModule, context: Context) -> Outcome:
    """Replace each mla_paged_attention that no kernel serves in this range."""
    assert context.first is not None
    sites = [
        node
        for node in gm.graph.nodes
        if node.target is ops.mla_paged_attention.overload and context.first(node) is None
    ]
    return Outcome([_absorbed(node, context) for node in sites])


class _Halves(NamedTuple):
    """The projections of a head: w_uk [H, L, P], w_uv [H, V, L], views of the weight."""

    w_uk: Node
    w_uv: Node


def _halves(before: Node, weight: Node, heads: int, nope: int) -> _Halves:
    rows, latent = value(weight).shape
    of_head = insert(before, aten.view.default, weight, [heads, rows // heads, latent])
    w_uk = insert(before, aten.slice.Tensor, of_head, 1, 0, nope)
    w_uv = insert(before, aten.slice.Tensor, of_head, 1, nope, rows // heads)
    return _Halves(insert(before, aten.transpose.int, w_uk, 1, 2), w_uv)


def _absorbed(node: Node, context: Context) -> Fired:
    arguments = ops.mla_paged_attention.signature.bind(*node.args, **node.kwargs).arguments
    q, weight, cache = (_node(arguments.pop(name)) for name in ("q", "weight", "kv_cache"))
    latent = value(weight).shape[-1]
    rotated = value(cache).shape[-1] - latent
    nope = value(q).shape[-1] - rotated
    heads = value(q).shape[-2]
    written = _only_writer(q)
    at = node if written is None else written
    halves = _halves(at, weight, heads, nope)
    if written is not None:
        latents = _quantized_product(written, weight, heads, nope, context)
        if latents is None:
            latents = insert(written, ops.linear_by_head.overload, _q_nope(written), halves.w_uk)
        written.args = (latents, *written.args[1:])
        infer(written)
        infer(q)
    else:
        parts = [
            insert(node, aten.slice.Tensor, q, -1, start, end)
            for start, end in ((0, nope), (nope, nope + rotated))
        ]
        parts[0] = insert(node, ops.linear_by_head.overload, parts[0], halves.w_uk)
        q = insert(node, aten.cat.default, parts, -1)
    attended = insert(
        node, ops.mla_absorbed_attention.overload, q, cache, latent=latent, **arguments
    )
    values = insert(node, ops.linear_by_head.overload, attended, halves.w_uv)
    replace(node, values)
    return Fired("select_mla_form", node, {}, {node}, [attended, values])


def _only_writer(q: Node) -> Node | None:
    """The mla_rope_kv_write whose queries only this attention reads, or None."""
    if q.target is not operator.getitem or q.args[1] != 0 or len(q.users) > 1:
        return None
    writer = _node(q.args[0])
    return writer if writer.target is ops.mla_rope_kv_write.overload else None


def _q_nope(writer: Node) -> Node:
    return _node(writer.args[0])


def _quantized_product(
    writer: Node, weight: Node, heads: int, nope: int, context: Context
) -> Node | None:
    """The queries of a write times W_UK, both in the format in which the model multiplies by
    kv_b_proj; None if no kernel multiplies and writes at once.
    """
    if weight.target is not ops.kv_b_weight.overload:
        return None
    stored = arguments_of(weight)
    scheme, codes = stored["activations"], fp8_of(context.platform)
    assert isinstance(scheme, str)
    if scheme not in BMM_SCHEMES or (scheme == "mxfp4" and nope % MXFP4_GROUP):
        return None
    if _is_off("bmm_rope_kv_write", writer, context):
        return None
    keys = insert(
        writer,
        ops.kv_b_keys.overload,
        *(stored[name] for name in ("weight", "weight_scale", "zeros")),
        **{name: stored[name] for name in ("scheme", "group")},
        heads=heads,
        nope=nope,
        product=scheme,
        codes=codes,
    )
    w_uk, scale = (insert(writer, operator.getitem, keys, i) for i in (0, 1))
    if not _is_served(writer, w_uk, scale, scheme, codes, context):
        for node in (scale, w_uk, keys):
            node.graph.erase_node(node)
        return None
    q_nope = _q_nope(writer)
    if scheme == "fp8":
        quantized = insert(writer, ops.quant_fp8_group.overload, q_nope, dtype=codes)
        bmm = ops.scaled_bmm_fp8.overload
    else:
        quantized = insert(writer, ops.quant_mxfp4.overload, q_nope)
        bmm = ops.bmm_mxfp4.overload
    q, q_scale = (insert(writer, operator.getitem, quantized, i) for i in (0, 1))
    return insert(writer, bmm, q, w_uk, q_scale, scale, out_dtype=value(q_nope).dtype)


def _is_off(name: str, node: Node, context: Context) -> bool:
    return context.options.passes.get(name) is False or context.off_here(name, node) is not None


def _is_served(
    writer: Node, w_uk: Node, scale: Node, scheme: str, codes: torch.dtype, context: Context
) -> bool:
    """Whether a kernel multiplies in this scheme and writes at once. One that waits for the device
    is for correctness alone.
    """
    assert context.first is not None
    arguments = {**arguments_of(writer), "weight": w_uk, "weight_scale": scale}
    fused = insert(writer, ops.bmm_rope_kv_write.overload, **arguments, scheme=scheme, dtype=codes)
    kernel = context.first(fused)
    writer.graph.erase_node(fused)
    return kernel is not None and not kernel.syncs


def _node(argument: Argument) -> Node:
    assert isinstance(argument, Node)
    return argument
