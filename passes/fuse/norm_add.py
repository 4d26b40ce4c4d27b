"""Fuse the norm of a layer's output with the add to the residual stream, and with the norm of the
sum, where one provider has kernels for the ops before and after.

x > rms_norm -+                               x -+
              add -> sum              =>         rms_norm_add -> sum
r ------------+                               r -+

x > rms_norm -+                               x -+
              add_rms_norm -+-> y     =>         rms_norm_add_rms_norm -+-> y
r ------------+             +-> sum           r -+                      +-> sum
"""

from collections.abc import Iterator
from functools import partial

from torch.fx import GraphModule, Node

from atomc import ops
from atomc.graph.canonical import call, value
from atomc.graph.op_call import OpCall, op_call
from atomc.graph.strides import same_strides
from atomc.passes.fuse.one_provider import (
    fuse,
    insert_fused,
    near_miss,
    preferred_parts,
)
from atomc.rewriting.graph_pass import Change, Context
from atomc.rewriting.matching.near_miss import NearMiss
from atomc.rewriting.matching.pattern import Difference
from atomc.rewriting.rewrite import Fired

NAME = "rms_norm_add"


def norm_add(gm: GraphModule, context: Context) -> Iterator[Change]:
    """Fuse each norm whose only reader is an add, if kernels are known. On a CPU Inductor does."""
    if context.first is None or context.platform.is_cpu:
        return
    for node in list(gm.graph.nodes):
        norm = op_call(node)
        if norm is None or norm.op is not ops.rms_norm or len(node.users) != 1:
            continue
        [reader] = node.users
        if (residual := _residual(node, reader)) is not None:
            miss = partial(near_miss, NAME, (node, reader))
            yield Change(reader, miss, partial(_fuse, norm, residual, reader, context))


def _residual(norm: Node, reader: Node) -> Node | None:
    """What an add, or an add with a norm of the sum, adds to this norm; None for another reader."""
    added = op_call(reader)
    if added is not None and added.op is ops.add_rms_norm:
        operands = [added["x"], added["residual"]]
    elif call(reader).op == "add" and call(reader).attrs.get("alpha", 1) == 1:
        operands = call(reader).operands
    else:
        return None
    others = [operand for operand in operands if operand is not norm]
    return others[0] if len(operands) == 2 and len(others) == 1 else None


def _fuse(norm: OpCall, residual: Node, reader: Node, context: Context) -> Fired | NearMiss:
    parts = (norm.node, reader)
    if not same_strides(value(norm.node), value(residual)):
        rows = "the norm and what it is added to with the same strides"
        return near_miss(NAME, parts, Difference("view", rows, "other strides", residual))
    fused = _inserted(norm, residual, reader)
    if preferred := preferred_parts(fused, parts, context):
        fused.graph.erase_node(fused)
        return near_miss(NAME, parts, preferred)
    return fuse(NAME, fused, parts, {name: norm.arguments[name] for name in ("eps", "style")})


def _inserted(norm: OpCall, residual: Node, reader: Node) -> Node:
    """The fused op in front of the reader, with the results of the reader."""
    x, weight, eps, style = (norm.arguments[name] for name in ("x", "weight", "eps", "style"))
    of_sum = op_call(reader)
    if of_sum is None:
        return insert_fused(reader, ops.rms_norm_add, x, residual, weight, eps, style)
    sum_weight, sum_eps, sum_style, keep_sum = (
        of_sum.arguments[name] for name in ("weight", "eps", "style", "keep_sum")
    )
    norms = weight, sum_weight, eps, sum_eps, style, sum_style
    return insert_fused(reader, ops.rms_norm_add_rms_norm, x, residual, *norms, keep_sum=keep_sum)
