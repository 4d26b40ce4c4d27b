"""Queries, keys and values as the op reads them, from the operands of the two products."""

from collections.abc import Iterator, Sequence

import torch
from torch.fx import Node
from torch.fx.node import Argument

from atomc.graph.canonical import call, uncast, value
from atomc.graph.edit import insert
from atomc.graph.expressions import Size, expression
from atomc.graph.provenance import describe
from atomc.graph.sizes import known_equal, same_sizes, spell_shape
from atomc.ops.formats import FLOATS
from atomc.passes.recognize.attention.match_site import AttentionSite
from atomc.passes.recognize.attention.products import LAYOUT, moves_ones, wide_dims
from atomc.rewriting.matching.pattern import Unlike

aten = torch.ops.aten
Shape = Sequence[Size]


def tokens_first(site: AttentionSite) -> list[Node]:
    """q [.., T, N, D], k and v [.., S, K, D], all in the dtype of the result."""
    result, dtype = site.result, value(site.result).dtype
    *leading, rows, keys = site.shape
    q, k = call(site.scores).operands[-2:]
    heads = [
        _heads(result, q, (*leading, rows), swapped=False),
        _heads(result, k, (*leading, keys), swapped=True),
        _heads(result, call(result).operands[1], (*leading, keys), swapped=False),
    ]
    # The op casts to fp32 by itself.
    heads = [uncast(node, [dtype]) or node for node in heads]
    for node in heads:
        if value(node).dtype != dtype or dtype not in FLOATS:
            actual = f"{describe(node)} in {value(node).dtype}"
            raise Unlike("dtype", f"q, k and v in {dtype}", actual, result)
    heads[1:] = [_unrepeated(result, node) for node in heads[1:]]
    if not known_equal(value(heads[1]).shape[-3], value(heads[2]).shape[-3]):
        raise Unlike("size", "keys and values with as many heads", describe(heads[2]), result)
    return [insert(result, aten.transpose.int, node, -3, -2) for node in heads]


def reshape(before: Node, node: Node, shape: Shape) -> Node:
    """A node in another shape, inserted in front of `before`. Symbolic sizes are arguments as
    nodes; one of them may be -1.
    """
    nodes_of_sizes = {
        expression(value(other)): other
        for other in before.graph.nodes
        if isinstance(value(other), torch.SymInt)
    }
    sizes: list[Argument] = [
        size if isinstance(size, int) else nodes_of_sizes.get(expression(size), -1)
        for size in shape
    ]
    if sizes.count(-1) > 1:
        raise Unlike("size", "sizes of the graph", spell_shape(shape), node)
    return insert(before, aten.reshape.default, node, sizes)


def _heads(before: Node, operand: Node, leading: Shape, swapped: bool) -> Node:
    """An operand of a product as [*leading, D]; swapped: the operand is [.., D, rows]."""
    width = value(operand).shape[-2 if swapped else -1]
    shape = [*leading, width]
    # One row and rows of one value have the same values in the same order either way.
    swapped = swapped and not any(known_equal(size, 1) for size in shape[-2:])
    best, turned = operand, swapped
    for node, is_turned in _unviewed(operand):
        if is_turned == swapped and _same_core(value(node).shape, shape):
            best, turned = node, False
    if turned:
        best = insert(before, aten.transpose.int, operand, -2, -1)
    return best if same_sizes(value(best).shape, shape) else reshape(before, best, shape)


def _unviewed(node: Node) -> Iterator[tuple[Node, bool]]:
    """The nodes that have the values of a node in another shape, and whether their last two
    dimensions are swapped.
    """
    turned = False
    while True:
        yield node, turned
        here = call(node)
        if here.op == "permute" and not moves_ones(node):
            if turned or not _swaps_last(node):
                return
            turned = True
        elif here.op not in (*LAYOUT, "permute") or (
            here.op == "expand" and not _same_core(value(node).shape, value(here.operands[0]).shape)
        ):
            return
        node = here.operands[0]


def _swaps_last(permute: Node) -> bool:
    """Whether a permutation swaps the last two dimensions that are not 1."""
    wide = wide_dims(permute)
    return len(wide) > 1 and [*wide[:-2], wide[-1], wide[-2]] == sorted(wide)


def _same_core(a: Shape, b: Shape) -> bool:
    """Whether two shapes are equal without their dimensions of size 1."""
    cores = [[size for size in shape if not known_equal(size, 1)] for shape in (a, b)]
    return same_sizes(*cores)


def _unrepeated(before: Node, node: Node) -> Node:
    """Keys or values [B, K, S, D] before their repetition to [B, K * G, S, D]."""
    spread = node
    while call(spread).op in ("view", "clone") and value(spread).dim() <= 5:
        spread = call(spread).operands[0]
    if call(spread).op != "expand" or value(spread).dim() != 5 or value(node).dim() != 4:
        return node
    source = call(spread).operands[0]
    once, many, merged = (value(part).shape for part in (source, spread, node))
    group_only = known_equal(once[-3], 1) and all(
        known_equal(once[d], many[d]) for d in (-5, -4, -2, -1)
    )
    keeps_sizes = all(known_equal(many[a], merged[b]) for a, b in ((-5, -4), (-2, -2), (-1, -1)))
    if not group_only or not keeps_sizes:
        return node
    inner = call(source).operands[0] if call(source).op == "view" else source
    shape = [once[-5], once[-4], once[-2], once[-1]]
    return inner if same_sizes(value(inner).shape, shape) else reshape(before, source, shape)
