"""Compute the tables of rotary positions by one op, where a kernel serves it.

                                          +-> cos > * scaling > to bf16
positions.float() * inv_freq > cat(f, f) -+
                                          +-> sin > * scaling > to bf16
 =>
rotary_tables(positions, inv_freq, "neox", scaling, bf16) -> cos, sin

The product may be a matrix product, (inv_freq[:, None] @ positions[None, :]).T, and instead of the
cat there may be repeat_interleave ("pairs") or nothing ("half"). On a CPU Inductor fuses the ops.
"""

import operator
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch.fx import GraphModule, Node

from atomc import ops
from atomc.graph.canonical import call, factor, only_reader, value
from atomc.graph.edit import insert, replace
from atomc.graph.mutation import storage
from atomc.graph.provenance import inherited
from atomc.graph.sizes import known_equal, same_shape, same_sizes
from atomc.graph.strides import Values, same_strides, spread_strides
from atomc.ops.formats import FLOATS
from atomc.rewriting.graph_pass import Change, Context
from atomc.rewriting.matching.near_miss import NearMiss
from atomc.rewriting.matching.pattern import Difference
from atomc.rewriting.rewrite import Fired

NAME = "rotary_tables"
aten = torch.ops.aten


class _Factors(NamedTuple):
    """Of a product: positions [..., 1 or n] and frequencies [n]. by_column: positions are
    [..., 1, T] instead, as a matrix product takes them.
    """

    positions: Node
    inv_freq: Node
    by_column: bool = False


def rotary_tables(gm: GraphModule, context: Context) -> Iterator[Change]:
    """Replace each pair of cos and sin of positions times frequencies."""
    if context.first is None or context.platform.is_cpu:
        return
    for cos in list(gm.graph.find_nodes(op="call_function", target=aten.cos.default)):
        [angles] = call(cos).operands
        sin = next((reader for reader in angles.users if reader.target is aten.sin.default), None)
        product, style = _unrepeated(angles)
        factors = _factors(product)
        if sin is not None and factors is not None:
            pair = (cos, sin)
            change = partial(_replace, pair, factors, style, context)
            yield Change(cos, partial(_miss, pair), change)


def _unrepeated(angles: Node) -> tuple[Node, str]:
    """The product whose columns the angles repeat, and the style of the tables."""
    here = call(angles)
    if here.op == "cat" and here.attrs["dim"] == -1 and len(here.operands) == 2:
        return (here.operands[0], "neox") if len({*here.operands}) == 1 else (angles, "half")
    inner, shapes = angles, []
    for op in ("view", "clone", "expand", "view"):
        if call(inner).op != op:
            return angles, "half"
        shapes.append(value(inner).shape)
        [inner] = call(inner).operands
    *lead, n = value(inner).shape
    repeated = ((*lead, 2 * n), (*lead, n, 2), (*lead, n, 2), (*lead, n, 1))
    return (inner, "pairs") if all(map(same_sizes, shapes, repeated)) else (angles, "half")


def _factors(product: Node) -> _Factors | None:
    """Those of a product in fp32, or None."""
    here = call(product)
    if value(product).dtype != torch.float32:
        return None
    if here.op == "mul" and len(here.operands) == 2:
        for positions, frequencies in here.orders():
            inv_freq = _vector(frequencies, -1)
            lead = value(positions).shape[:-1]
            if inv_freq is not None and same_sizes(lead, value(product).shape[:-1]):
                return _Factors(_uncast(positions), inv_freq)
    matmul = call(here.operands[0]) if here.attrs.get("dims") == (-1, -2) else here
    if matmul is not here and matmul.op == "bmm":
        frequencies, positions = matmul.operands
        inv_freq = _vector(frequencies, -2)
        if inv_freq is not None and known_equal(value(positions).shape[1], 1):
            return _Factors(_uncast(positions), inv_freq, by_column=True)
    return None


def _vector(node: Node, dim: int) -> Node | None:
    """The vector of which a view has all elements in this dimension, so that it repeats them along
    the others; None if there is none.
    """
    x, base = value(node), storage(node)
    if same_strides(value(_uncast(base)), value(base)):
        base = storage(_uncast(base))
    vector = value(base)
    if x.dim() < -dim or vector.dim() != 1 or not known_equal(x.stride(dim), 1):
        return None
    return base if known_equal(x.shape[dim], vector.shape[0]) else None


def _uncast(node: Node) -> Node:
    """What is cast to fp32, and expanded to the sizes that it has."""
    here = call(node)
    if here.op == "expand" and same_shape(value(node), value(here.operands[0])):
        return _uncast(here.operands[0])
    is_cast = here.op == "cast" and value(node).dtype == torch.float32
    return here.operands[0] if is_cast else node


def _table(node: Node) -> tuple[Node, float]:
    """What all readers of a cos or sin get: it may be scaled, and then cast. Also the scaling."""
    scaling = 1.0
    reader = only_reader(node)
    if reader is not None and call(reader).op == "mul" and (by := factor(reader)) is not None:
        node, scaling, reader = reader, by, only_reader(reader)
    is_cast = reader is not None and call(reader).op == "cast" and value(reader).dtype in FLOATS
    return (reader if reader is not None and is_cast else node), scaling


def _miss(pair: tuple[Node, Node], difference: Difference) -> NearMiss:
    return NearMiss(NAME, "", pair[0], 2, 2, 0, [difference], {*pair})


def _replace(
    pair: tuple[Node, Node], factors: _Factors, style: str, context: Context
) -> Fired | NearMiss:
    (cos, scaling), (sin, sin_scaling) = map(_table, pair)
    tables, dtype = (cos, sin), value(cos).dtype
    if (value(sin).dtype, sin_scaling) != (dtype, scaling):
        tables, dtype, scaling = pair, torch.float32, 1.0
    [angles] = call(pair[0]).operands
    positions, inv_freq, by_column = factors
    if by_column:
        positions = insert(angles, aten.transpose.int, positions, 1, 2)
    both = insert(angles, ops.rotary_tables.overload, positions, inv_freq, style, scaling, dtype)
    assert context.first is not None
    if context.first(both) is None:
        angles.graph.erase_node(both)
        if by_column:
            angles.graph.erase_node(positions)
        return _miss(pair, Difference("guard", f"a kernel for {NAME}", "none", pair[0]))
    replaced = {angles, *pair, *tables}
    consumed = tuple(call(node).op for node in sorted(replaced))
    both.meta.update(inherited(sorted(replaced), pair[0], NAME, consumed))
    for i, table in enumerate(tables):
        part = insert(angles, operator.getitem, both, i)
        part.meta.update(inherited(sorted(replaced), pair[0], NAME, consumed))
        replace(table, part)
        if not same_strides(value(part), value(table)):
            spread_strides(part.graph, part, value(table), Values(part.graph))
    attrs = {"style": style, "scaling": scaling, "dtype": dtype}
    return Fired(NAME, pair[0], attrs, replaced, [both], consumed)
