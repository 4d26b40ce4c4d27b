"""The batches of products at both ends of a walk, and the ops between that change no value."""

from torch.fx import Node

from atomc.graph.canonical import call, dims_of, value
from atomc.graph.sizes import known_equal

PRODUCTS = ("bmm", "baddbmm")
LAYOUT = ("view", "clone", "expand", "alias")


def has_product(node: Node, depth: int = 16) -> bool:
    """Whether a node is computed from a batch of products by the ops of a walk."""
    here = call(node)
    if here.op in PRODUCTS:
        return True
    walked = (*LAYOUT, "cast", "permute", "mul", "div", "tanh", "add", "sub", "masked_fill")
    inputs = {"where": here.operands[1:], "cat": here.operands[:1], "_softmax": here.operands}
    operands = here.operands if here.op in walked else inputs.get(here.op, [])
    return depth > 0 and any(has_product(operand, depth - 1) for operand in operands)


def derives_from_product(node: Node, depth: int = 16) -> bool:
    """Whether a node is computed from a batch of products, by whatever ops, as first operands."""
    while depth and call(node).operands and call(node).op not in PRODUCTS:
        node, depth = call(node).operands[0], depth - 1
    return call(node).op in PRODUCTS


def moves_ones(permute: Node) -> bool:
    """Whether a permutation only moves dimensions of size 1."""
    wide = wide_dims(permute)
    return wide == sorted(wide)


def wide_dims(permute: Node) -> list[int]:
    """The dimensions of a permutation's operand that are not 1, in their new order."""
    source = value(call(permute).operands[0]).shape
    dims = dims_of(call(permute).attrs["dims"])
    return [d for d in dims if not known_equal(source[d], 1)]
