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

Where the model multiplies rows in fp8 or MXFP4 by kv_b_proj, so do these products where a kernel
serves it: the first one by a kernel of bmm_rope_kv_write (passes/fuse/bmm_kv_write.py), others by
one of quantized_linear_by_head.

    q_nope > quantizer > bmm -+- mla_rope_kv_write
    kv_b_half, for keys ------+
    mla_absorbed_attention > quantized_linear_by_head
    kv_b_half, for values ---+

So do keys and values that a kernel computes from the cache: of quantized_mla_paged_attention, over
the weight as it is stored.
"""

import operator
from functools import partial
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import Argument

from atomc import ops
from atomc.graph.canonical import value
from atomc.graph.edit import infer, insert, replace
from atomc.graph.op_call import arguments_of
from atomc.ops.mla import BMM_SCHEMES
from atomc.ops.op import Op
from atomc.passes.bind_state import fp8_of
from atomc.rewriting.graph_pass import Context, Outcome
from atomc.rewriting.rewrite import Fired, remove_dead_nodes

aten = torch.ops.aten
MXFP4_GROUP = 32


def select_mla_form(gm: GraphModule, context: Context) -> Outcome:
    """Replace each mla_paged_attention that no kernel serves in this range, or whose keys and
    values a kernel computes in the format of the model.
    """
    assert context.first is not None
    sites = [node for node in gm.graph.nodes if node.target is ops.mla_paged_attention.overload]
    served = {node: context.first(node) is not None for node in sites}
    fired = [
        _quantized(node, context) if served[node] else _absorbed(node, context) for node in sites
    ]
    remove_dead_nodes(gm.graph)
    return Outcome([each for each in fired if each is not None])


def _quantized(node: Node, context: Context) -> Fired | None:
    """The site with the weight that is stored, if a kernel multiplies as the model does."""
    arguments = ops.mla_paged_attention.signature.bind(*node.args, **node.kwargs).arguments
    weight = _node(arguments.pop("weight"))
    if weight.target is not ops.kv_b_weight.overload or arguments.pop("chosen", None) is not None:
        return None
    of_weight = arguments_of(weight)
    if (of_weight["scheme"], of_weight["activations"]) not in (
        ("fp8_block", "fp8"),
        ("mxfp4", "mxfp4"),
    ):
        return None
    if of_weight["group"] != 128 or _is_off("linear_split_cat", node, context):
        return None
    arguments |= {name: of_weight[name] for name in ("weight", "weight_scale", "scheme")}
    arguments["dtype"] = fp8_of(context.platform)
    if not _is_served(node, ops.quantized_mla_paged_attention, arguments, context):
        return None
    attended = insert(node, ops.quantized_mla_paged_attention.overload, **arguments)
    replace(node, attended)
    return Fired("select_mla_form", node, {}, {node}, [attended])


def _absorbed(node: Node, context: Context) -> Fired:
    arguments = ops.mla_paged_attention.signature.bind(*node.args, **node.kwargs).arguments
    q, weight, cache = (_node(arguments.pop(name)) for name in ("q", "weight", "kv_cache"))
    latent = value(weight).shape[-1]
    rotated = value(cache).shape[-1] - latent
    nope = value(q).shape[-1] - rotated
    heads = value(q).shape[-2]
    product = partial(_product, weight=weight, heads=heads, nope=nope, context=context)
    written = _only_writer(q)
    if written is not None:
        written.args = (product(written, _q_nope(written), "keys"), *written.args[1:])
        infer(written)
        infer(q)
    else:
        parts = [
            insert(node, aten.slice.Tensor, q, -1, start, end)
            for start, end in ((0, nope), (nope, nope + rotated))
        ]
        parts[0] = product(node, parts[0], "keys")
        q = insert(node, aten.cat.default, parts, -1)
    attended = insert(
        node, ops.mla_absorbed_attention.overload, q, cache, latent=latent, **arguments
    )
    values = product(node, attended, "values")
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


def _product(
    at: Node, x: Node, part: str, *, weight: Node, heads: int, nope: int, context: Context
) -> Node:
    """x times the half of kv_b_proj for keys, [H, L, P], or values, [H, V, L], inserted before
    `at`, which writes the product of keys or another op.
    """
    half = _quantized_half(at, part, weight, heads, nope, context)
    if half is not None:
        if at.target is ops.mla_rope_kv_write.overload and _is_served(
            at, ops.bmm_rope_kv_write, {**arguments_of(at), **half}, context
        ):
            return _fusible_product(at, x, half)
        if _is_served(at, ops.quantized_linear_by_head, {"x": x, **half}, context):
            return insert(at, ops.quantized_linear_by_head.overload, x, **half)
    rows, latent = value(weight).shape
    of_head = insert(at, aten.view.default, weight, [heads, rows // heads, latent])
    ends = (0, nope) if part == "keys" else (nope, rows // heads)
    matrices = insert(at, aten.slice.Tensor, of_head, 1, *ends)
    if part == "keys":
        matrices = insert(at, aten.transpose.int, matrices, 1, 2)
    return insert(at, ops.linear_by_head.overload, x, matrices)


def _quantized_half(
    at: Node, part: str, weight: Node, heads: int, nope: int, context: Context
) -> dict[str, Any] | None:
    """The arguments of a product by a half of kv_b_proj in the format in which the model multiplies
    by kv_b_proj; None if there is none.
    """
    if weight.target is not ops.kv_b_weight.overload:
        return None
    of_weight = arguments_of(weight)
    scheme, codes = of_weight["activations"], fp8_of(context.platform)
    columns = nope if part == "keys" else value(weight).shape[1]
    if scheme not in BMM_SCHEMES or (scheme == "mxfp4" and columns % MXFP4_GROUP):
        return None
    if _is_off("bmm_rope_kv_write", at, context):
        return None
    half = insert(
        at,
        ops.kv_b_half.overload,
        *(of_weight[name] for name in ("weight", "weight_scale", "zeros")),
        **{name: of_weight[name] for name in ("scheme", "group")},
        heads=heads,
        nope=nope,
        part=part,
        product=scheme,
        codes=codes,
    )
    matrices, scale = (insert(at, operator.getitem, half, i) for i in (0, 1))
    return {"weight": matrices, "weight_scale": scale, "scheme": scheme, "dtype": codes}


def _fusible_product(at: Node, x: Node, half: dict[str, Any]) -> Node:
    """The product as passes/fuse/bmm_kv_write.py matches it."""
    if half["scheme"] == "fp8":
        quantized = insert(at, ops.quant_fp8_group.overload, x, dtype=half["dtype"])
        bmm = ops.scaled_bmm_fp8.overload
    else:
        quantized = insert(at, ops.quant_mxfp4.overload, x)
        bmm = ops.bmm_mxfp4.overload
    codes, scale = (insert(at, operator.getitem, quantized, i) for i in (0, 1))
    return insert(
        at, bmm, codes, half["weight"], scale, half["weight_scale"], out_dtype=value(x).dtype
    )


def _is_off(name: str, node: Node, context: Context) -> bool:
    return context.options.passes.get(name) is False or context.off_here(name, node) is not None


def _is_served(at: Node, op: Op, arguments: dict[str, Any], context: Context) -> bool:
    """Whether a kernel serves this op with these arguments. One that waits for the device is for
    correctness alone.
    """
    assert context.first is not None
    node = insert(at, op.overload, **arguments)
    kernel = context.first(node)
    node.graph.erase_node(node)
    return kernel is not None and not kernel.syncs


def _node(argument: Argument) -> Node:
    assert isinstance(argument, Node)
    return argument
