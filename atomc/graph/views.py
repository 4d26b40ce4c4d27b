"""Names of the ops of nodes, and views."""

import operator

from torch.fx import Node

from atomc.graph.canonical import Call, call, dims_of
from atomc.graph.node_record import record_of

# Views, assertions and allocations: they move no data.
ZERO_COST = frozenset({
    "view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "expand", "transpose", "t",
    "permute", "slice", "select", "split", "split_with_sizes", "chunk", "unbind", "alias", "detach",
    "as_strided", "unflatten", "flatten", "_assert_scalar", "sym_size",
    "sym_constrain_range_for_size", "lift_fresh_copy", "empty", "getitem",
})  # fmt: skip
PARTIAL_VIEWS = frozenset(
    {"slice", "select", "split", "split_with_sizes", "chunk", "unbind", "getitem"}
)


def schema_name(node: Node) -> str:
    """ "atom::rms_norm", "aten::mm"; "" without a schema."""
    schema = getattr(node.target, "_schema", None)
    return "" if schema is None else str(schema.name)


def name_of(node: Node) -> str:
    """ "rms_norm", "mm", "getitem"."""
    if schema := schema_name(node):
        return schema.partition("::")[2]
    if node.target is operator.getitem:
        return "getitem"
    op, target = record_of(node).op, node.target
    return op or (target if isinstance(target, str) else str(getattr(target, "__name__", target)))


def view_base(node: Node) -> Node:
    """The tensor that a view reads: the node that allocated the memory, or a view of only a part of
    it.
    """
    return _behind(node, ZERO_COST - PARTIAL_VIEWS)


def storage_node(node: Node) -> Node:
    """The node that allocated the memory of a view."""
    return _behind(node, ZERO_COST)


def _behind(node: Node, views: frozenset[str]) -> Node:
    while node.op == "call_function" and name_of(node) in views and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def permuted_back(node: Node) -> Node | None:
    """The earlier node whose value a permutation returns: it keeps the order, or restores that
    before another permutation. None for all other nodes.
    """
    here = call(node)
    if here.op != "permute":
        return None
    inner = call(here.operands[0])
    if not dims_of(here.attrs["dims"]):
        return here.operands[0]
    if inner.op != "permute":
        return None
    rank = max(len(dims_of(each.attrs["dims"])) for each in (here, inner))
    before, after = _order(inner, rank), _order(here, rank)
    return inner.operands[0] if [before[d] for d in after] == list(range(-rank, 0)) else None


def _order(permute: Call, rank: int) -> list[int]:
    """The order of the last `rank` dimensions, counted from the end."""
    dims = dims_of(permute.attrs["dims"])
    return [*range(-rank, -len(dims)), *dims]
