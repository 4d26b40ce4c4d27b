"""Calls of ops, with their arguments by name."""

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from inspect import BoundArguments

from torch.fx import Node
from torch.fx.node import Argument

from atomc.graph.canonical import value
from atomc.ops.op import Op, op_of
from atomc.ops.op_traits import Arguments, Kind


@dataclass(frozen=True)
class OpCall:
    """A call of an op. arguments: by parameter, defaults included."""

    op: Op
    node: Node
    arguments: Mapping[str, Argument]

    def __getitem__(self, name: str) -> Node:
        """An argument that is a node."""
        argument = self.arguments[name]
        assert isinstance(argument, Node)
        return argument

    @property
    def values(self) -> Arguments:
        """The arguments, nodes by their fake values."""
        return {
            name: value(argument) if isinstance(argument, Node) else argument
            for name, argument in self.arguments.items()
        }

    def bound(self, **changed: Argument) -> BoundArguments:
        """The arguments of a call of the op with these in the place of its own."""
        return self.op.signature.bind(**{**self.arguments, **changed})


def op_call(node: Node) -> OpCall | None:
    """None for a node that calls no op."""
    op = op_of(node.target)
    return None if op is None else OpCall(op, node, op.bind(*node.args, **node.kwargs))


def kind_of(node: Node) -> Kind:
    """What the op that a node calls computes; no kind for another node."""
    op = op_of(node.target)
    return Kind(0) if op is None else op.kind


def quantizer_of(codes: Node) -> Node | None:
    """The call of the quantizer that has these codes or scales as a result, or None."""
    source = codes.args[0] if codes.target is operator.getitem else codes
    return source if isinstance(source, Node) and kind_of(source) is Kind.QUANTIZE else None


def called_op(node: Node) -> Op:
    """The op that a node calls."""
    op = op_of(node.target)
    assert op is not None
    return op


def arguments_of(node: Node) -> Mapping[str, Argument]:
    """The arguments of a call of an op by parameter, defaults included."""
    return called_op(node).bind(*node.args, **node.kwargs)
