"""Multiply 16-bit operands that a model casts to fp32 for a product: routers.

    x ------> to fp32 -+
                       +- linear -> fp32    =>    linear_fp32(x, weight)
    weight -> to fp32 -+

Results differ only by the order of additions. As written, each step casts the weight, and the
product does not run on tensor cores. A cast that others read as well stays for them.

A Rewrite does not fit: the casts of a pattern may be absent where the dtype is right, so that each
linear of a model would be a near miss.
"""

from collections.abc import Iterator
from functools import partial

from torch.fx import GraphModule, Node

from atomc import ops
from atomc.graph.canonical import call, uncast, value
from atomc.graph.provenance import describe, inherited, module_path
from atomc.ops.op import op_of
from atomc.rewriting.graph_pass import Change, Context
from atomc.rewriting.matching.near_miss import NearMiss
from atomc.rewriting.matching.pattern import Difference
from atomc.rewriting.rewrite import Fired

NAME = "linear_fp32"


def linear_fp32(gm: GraphModule, context: Context) -> Iterator[Change | NearMiss]:
    """Replace every product of two casts to fp32."""
    for node in list(gm.graph.nodes):
        if op_of(node.target) is not ops.linear:
            continue
        casts = [operand for operand in call(node).operands[:2] if uncast(operand) is not None]
        if not casts:
            continue
        miss = partial(_miss, node, casts)
        difference = _difference(node, context)
        yield miss(difference) if difference else Change(node, miss, partial(_replace, node, casts))


def _miss(node: Node, casts: list[Node], difference: Difference) -> NearMiss:
    matched = {node, *casts}
    return NearMiss(NAME, "", node, len(matched), 3, 0, [difference], matched)


def _difference(node: Node, context: Context) -> Difference | None:
    """Why a linear that reads a cast is not replaced, or None."""
    x, weight, *bias = call(node).operands
    stored, stored_weight = uncast(x), uncast(weight)
    if stored is None:
        return Difference("dtype", "x in 16 bits, cast to fp32", f"{describe(x)} in fp32", node)
    if stored_weight is None:
        in_fp32 = f"{describe(weight)} in fp32"
        return Difference("dtype", "a weight in 16 bits, cast to fp32", in_fp32, node)
    dtype = value(stored).dtype
    if value(stored_weight).dtype != dtype:
        other = f"{describe(stored_weight)} in {value(stored_weight).dtype}"
        return Difference("dtype", f"a weight in {dtype}, as x", other, node)
    if bias:
        return Difference("arguments", "no bias", f"{describe(bias[0])} is added", node)
    if context.lora is not None and context.lora.changes(module_path(node)):
        adapters = "LoRA adapters may change it, in fp32"
        return Difference("guard", "a layer that adapters do not change", adapters, node)
    return None


def _replace(node: Node, casts: list[Node]) -> Fired:
    x, weight = (call(cast).operands[0] for cast in casts)
    with node.graph.inserting_before(node):
        product = node.graph.call_function(ops.linear_fp32.overload, (x, weight))
    replaced = [node, *casts]
    consumed = tuple(call(each).op for each in replaced)
    product.meta.update(inherited(replaced, node, NAME, consumed), val=value(node))
    node.replace_all_uses_with(product)
    return Fired(NAME, node, {"stored": value(x).dtype}, {node, *casts}, [product], consumed)
