"""The tensors that a call writes in place, and the base of a view."""

import operator
from collections.abc import Iterator

from torch.fx import Node
from torch.fx.node import map_arg

from atomc.graph.node_record import record_of
from atomc.ops.op import REGISTRY


def storage(node: Node) -> Node:
    """The node that owns the memory of a view."""
    while (source := _viewed(node)) is not None:
        node = source
    return node


def views_of(node: Node) -> Iterator[Node]:
    """The node and all views of its memory, each after what it is a view of."""
    yield node
    for user in node.users:
        if user.args and user.args[0] is node and _viewed(user) is not None:
            yield from views_of(user)


def _viewed(node: Node) -> Node | None:
    """The base of a view, or of one of several views; None if the node is not a view."""
    view = node.args[0] if node.target is operator.getitem else node
    schema = getattr(view.target, "_schema", None) if isinstance(view, Node) else None
    alias = schema.arguments[0].alias_info if schema is not None and schema.arguments else None
    if alias is None or alias.is_write or not isinstance(view, Node) or not view.args:
        return None
    return view.args[0] if isinstance(view.args[0], Node) else None


def mutated(node: Node) -> list[Node]:
    """The tensors that a node writes in place."""
    if (op := REGISTRY.get(record_of(node).op)) is not None:
        # Lowered: a function, of the op's arguments and perhaps more, which then have names.
        named = op.signature.bind_partial(*node.args).arguments
        targets = [{**named, **node.kwargs}.get(name) for name in op.mutates]
        return [target for target in targets if isinstance(target, Node)]
    schema = getattr(node.target, "_schema", None)
    if node.op != "call_function" or schema is None or not schema.is_mutable:
        return []
    written: list[Node] = []
    for i, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            operand = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name)
            map_arg(operand, written.append)  # one tensor, or a list of them
    return written
