"""Rotate by the first half of tables whose halves are equal, where another kernel serves that.

    rotary_tables(..., "neox") > views > qk_norm_rope_kv_write(..., cos, sin, "neox")
 =>
    rotary_tables(..., "neox") > views > slices > qk_norm_rope_kv_write(..., cos, sin, "half")

In this style `rotary_tables` has all angles twice. Each number of the result comes from the same
products, with the same roundings.
"""

import operator

import torch
from torch.fx import GraphModule, Node

from atomc import ops
from atomc.graph.canonical import value
from atomc.graph.edit import infer, insert
from atomc.graph.mutation import storage
from atomc.graph.op_call import op_call
from atomc.graph.sizes import known_equal
from atomc.graph.strides import same_strides
from atomc.rewriting.graph_pass import Context
from atomc.rewriting.rewrite import Fired

NAME = "half_tables"


def half_tables(gm: GraphModule, context: Context) -> list[Fired]:
    """Change the style of calls whose result stays where it was in memory."""
    if context.first is None:
        return []
    fired = []
    halves: dict[Node, Node] = {}
    for node in list(gm.graph.nodes):
        called = op_call(node)
        if called is None or called.arguments.get("rope_style") != "neox":
            continue
        tables = {name: called[name] for name in ("cos", "sin")}
        if not all(map(_repeats_angles, tables.values())):
            continue
        for table in tables.values():
            halves[table] = halves.get(table) or _first_half(table)
        half = {name: halves[table] for name, table in tables.items()}
        kernel, before = context.first(node), (node.args, node.kwargs, value(node))
        bound = called.bound(**half, rope_style="half")
        node.args, node.kwargs = bound.args, bound.kwargs
        infer(node)
        if context.first(node) is kernel or not same_strides(value(node), before[2]):
            node.args, node.kwargs, node.meta["val"] = before
        else:
            fired.append(Fired(NAME, node))
    for half_table in halves.values():
        if not half_table.users:
            gm.graph.erase_node(half_table)
    return fired


def _repeats_angles(table: Node) -> bool:
    """Whether it is a view of whole rows of a table that has all angles twice."""
    base, rows = storage(table), value(table)
    made = op_call(base.args[0]) if base.target is operator.getitem else None
    if made is None or made.op is not ops.rotary_tables or made.arguments["style"] != "neox":
        return False
    width = value(base).shape[-1]
    steps = [
        step
        for size, step in zip(rows.shape[:-1], rows.stride()[:-1], strict=True)
        if not known_equal(size, 1)
    ]
    return (
        known_equal(rows.shape[-1], width)
        and known_equal(rows.stride(-1), 1)
        and all(known_equal(step % width, 0) for step in (*steps, rows.storage_offset()))
    )


def _first_half(table: Node) -> Node:
    width = value(table).shape[-1] // 2
    half = insert(table.next, torch.ops.aten.slice.Tensor, table, -1, 0, width)
    half.meta.update({key: item for key, item in table.meta.items() if key != "val"})
    return half
