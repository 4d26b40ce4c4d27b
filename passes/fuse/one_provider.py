"""Fuse two nodes where one provider has kernels for the ops before and after: elsewhere the kernels
of the parts, or Inductor, are preferred.
"""

from torch.fx import Node
from torch.fx.node import Argument

from atomc.graph.canonical import call, value
from atomc.graph.edit import replace
from atomc.graph.op_call import called_op
from atomc.graph.provenance import inherited
from atomc.ops.op import Op, op_of
from atomc.rewriting.graph_pass import Context
from atomc.rewriting.matching.near_miss import NearMiss
from atomc.rewriting.matching.pattern import Difference
from atomc.rewriting.rewrite import Attrs, Fired

Pair = tuple[Node, Node]  # a node and its reader


def near_miss(name: str, parts: Pair, difference: Difference) -> NearMiss:
    return NearMiss(name, "", parts[1], 2, 2, 0, [difference], {*parts})


def insert_fused(reader: Node, op: Op, *args: Argument, **kwargs: Argument) -> Node:
    """A call of the op in front of the reader, with the value of the reader."""
    with reader.graph.inserting_before(reader):
        fused = reader.graph.call_function(op.overload, args, kwargs)
    fused.meta["val"] = value(reader)
    return fused


def fuse(name: str, fused: Node, parts: Pair, attrs: Attrs) -> Fired:
    """Replace the reader by `fused`, which `insert_fused` has inserted."""
    reader = parts[1]
    consumed = tuple(call(part).op for part in parts)
    fused.meta.update(inherited(parts, reader, name, consumed))
    replace(reader, fused)
    return Fired(name, reader, attrs, {*parts}, [fused], consumed)


def preferred_parts(fused: Node, parts: Pair, context: Context) -> Difference | None:
    """Why the kernels of the parts are preferred: no kernel of their provider serves the fused op.
    None if one does.
    """
    assert context.first is not None
    kernels = [context.first(node) for node in (fused, *parts) if op_of(node.target)]
    provider, *others = ["no kernel" if one is None else one.provider for one in kernels]
    if kernels[0] is not None and {provider} == {*others}:
        return None
    name, of_parts = called_op(fused).name, " and ".join(dict.fromkeys(others))
    return Difference(
        "guard",
        f"kernels of one provider for {name} and what it replaces",
        f"{provider} for {name}, {of_parts} for what it replaces",
        parts[1],
    )
