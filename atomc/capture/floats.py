"""Converts Python floats that Dynamo lifted to 0-d inputs (eps, under dynamic=True) back to
constants, also in regions.
"""

from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import Argument

from atomc.capture.inline_regions import inline, region, regions_of, replace_uses


def restore_float_constants(gm: GraphModule, floats: dict[int, float]) -> None:
    """Replace the inputs with these numbers by constants. The inputs themselves stay, unused.

    torch 2.13 passes such a float to a region in three ways, even for one region: as the input, as
    the result of `item` on it, and as a constant. If calls of one region pass different values, all
    regions are inlined.
    """
    values_by_node = _float_values(gm, floats)

    def constant(operand: Argument) -> float | None:
        if isinstance(operand, Node):
            return values_by_node.get(operand)
        return operand if isinstance(operand, float) else None

    everywhere = regions_of(gm)
    if any(
        len(set(map(constant, same))) > 1
        for calls in everywhere.values()
        for same in _operands(calls)
    ):
        inline_floats(gm)
        values_by_node, everywhere = _float_values(gm, floats), {}
    for name, calls in everywhere.items():
        body = region(gm, name)
        values = [constant(same[0]) for same in _operands(calls)]
        for placeholder, value in zip(body.graph.find_nodes(op="placeholder"), values, strict=True):
            if value is not None:
                _make_constant(placeholder, value)
                body.graph.erase_node(placeholder)
        for call in calls:
            others = (x for x, value in zip(call.args[2:], values, strict=True) if value is None)
            call.args = (*call.args[:2], *others)
        _fold_item_calls(body)
    for node, value in values_by_node.items():
        if node.op == "placeholder":
            _make_constant(node, value)
    _fold_item_calls(gm)


def inline_floats(gm: GraphModule) -> None:
    """Inline all regions, and replace `item` on a number by the number."""
    inline(gm)
    _fold_item_calls(gm)


def _fold_item_calls(gm: GraphModule) -> None:
    for node in gm.graph.find_nodes(op="call_method", target="item"):
        number = node.args[0]
        if isinstance(number, float) or (isinstance(number, Node) and is_item(number)):
            replace_uses(node, number)
            gm.graph.erase_node(node)
    gm.recompile()


def _operands(calls: list[Node]) -> list[tuple[Argument, ...]]:
    """The operands of the calls, grouped by position."""
    return list(zip(*(call.args[2:] for call in calls), strict=True))


def _float_values(gm: GraphModule, floats: dict[int, float]) -> dict[Node, float]:
    """The inputs, and the `item` nodes on them, with their values."""
    placeholders = gm.graph.find_nodes(op="placeholder")
    values_by_node: dict[Node, float] = {
        placeholders[number]: value for number, value in floats.items()
    }
    return values_by_node | {
        reader: value
        for node, value in values_by_node.items()
        for reader in node.users
        if is_item(reader)
    }


def is_item(node: Node) -> bool:
    return node.op == "call_method" and node.target == "item"


def _make_constant(node: Node, value: float) -> None:
    for reader in list(node.users):
        if is_item(reader):
            replace_uses(reader, value)
            reader.graph.erase_node(reader)
    if not isinstance(node.meta.get("example_value"), Tensor):
        replace_uses(node, value)
