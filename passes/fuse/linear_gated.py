"""Let the linear layer to gate and up compute their gate, where one provider has kernels for all.

    x > linear -+-> gate -+
                |         silu_and_mul (or gelu_and_mul)    =>    x > linear_gated
                +-> up ---+

It runs once per range of token counts, because kernels that multiply few rows have a gate, and
libraries that multiply many have none.
"""

from collections.abc import Iterator
from functools import partial

from torch.fx import GraphModule, Node

from atomc import ops
from atomc.graph.canonical import call, readers, value
from atomc.graph.op_call import OpCall, op_call
from atomc.graph.sizes import known_equal
from atomc.ops.activation import GATES
from atomc.ops.op_traits import Kind
from atomc.passes.fuse.one_provider import (
    fuse,
    insert_fused,
    near_miss,
    preferred_parts,
)
from atomc.rewriting.graph_pass import Change, Context
from atomc.rewriting.rewrite import Fired

NAME = "linear_gated"


def linear_gated(gm: GraphModule, context: Context) -> Iterator[Change]:
    """Fuse each gate whose operands are the halves of a linear layer that nothing else reads."""
    if context.choose is None:
        return
    for node in list(gm.graph.nodes):
        gate = op_call(node)
        if gate is None or gate.op.kind is not Kind.GATE:
            continue
        linear, activation = _halved(gate), _activation(gate)
        if linear is None or activation is None:
            continue
        parts = (linear.node, node)
        fused = _inserted(linear, gate, activation)
        preferred = preferred_parts(fused, parts, context)
        node.graph.erase_node(fused)
        if preferred is None:  # that a library multiplies many rows is no miss
            miss = partial(near_miss, NAME, parts)
            yield Change(node, miss, partial(_fuse, linear, gate, activation))


def _activation(gate: OpCall) -> str | None:
    attributes = {name: x for name, x in gate.arguments.items() if isinstance(x, str)}
    computes = gate.op, attributes
    return next((name for name, computed in GATES.items() if computed == computes), None)


def _halved(gate: OpCall) -> OpCall | None:
    """The linear layer of which the operands are the first and the last half, or None."""
    halves = call(gate.node).operands
    first = call(halves[0])
    if len(halves) != 2 or first.op != "slice":
        return None
    linear = op_call(first.operands[0])
    if linear is None or linear.op is not ops.linear:
        return None
    columns = value(linear.node).shape[-1]
    for half, start in zip(halves, (0, columns // 2), strict=True):
        attrs = call(half).attrs
        if (
            call(half).operands != [linear.node]
            or list(half.users) != [gate.node]
            or (attrs["dim"], attrs["step"], attrs["start"]) != (-1, 1, start)
            or not known_equal(value(half).shape[-1], columns // 2)
        ):
            return None
    return linear if set(readers(linear.node)) == {*halves} else None


def _inserted(linear: OpCall, gate: OpCall, activation: str) -> Node:
    """The fused op in front of the gate."""
    operands = tuple(linear.arguments[name] for name in ("x", "weight", "bias"))
    return insert_fused(gate.node, ops.linear_gated, *operands, activation)


def _fuse(linear: OpCall, gate: OpCall, activation: str) -> Fired:
    fused = _inserted(linear, gate, activation)
    return fuse(NAME, fused, (linear.node, gate.node), {"activation": activation})
