"""Give a write to the cache the form of its arguments that another kernel serves: without the batch
of one that stock models have, and with the first half of tables whose halves are equal.

    q, k, v, cos, sin [1, T, ...] > rope_kv_write -+-> q
                                                   +-> token
 =>
    q, k, v, cos, sin > squeeze > rope_kv_write -+-> q > unsqueeze
                                                 +-> token

    rotary_tables(..., "neox") > views > qk_norm_rope_kv_write(..., cos, sin, "neox")
 =>
    rotary_tables(..., "neox") > views > slices > qk_norm_rope_kv_write(..., cos, sin, "half")

In this style `rotary_tables` has all angles twice. Each number of the result comes from the same
products, with the same roundings.
"""

import operator
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import Argument

from atomc import ops
from atomc.graph.canonical import Value, value
from atomc.graph.edit import infer, insert
from atomc.graph.mutation import storage
from atomc.graph.op_call import OpCall, arguments_of, op_call
from atomc.graph.sizes import known_equal
from atomc.graph.strides import Values, same_strides, spread_strides
from atomc.ops.op import Kernel
from atomc.rewriting.graph_pass import Context
from atomc.rewriting.rewrite import Fired

NAME = "write_forms"
aten = torch.ops.aten
# (what, tensor) -> its view, one for the calls of all layers.
Views = dict[tuple[str, Node], Node]
Arguments = Mapping[str, Argument]


def write_forms(gm: GraphModule, context: Context) -> list[Fired]:
    """Change calls whose results stay where they were in memory."""
    fired: list[Fired] = []
    views: Views = {}
    if context.first is None:
        return fired
    for node in list(gm.graph.nodes):
        called = op_call(node)
        if called is None or "slots" not in called.arguments:
            continue
        kernel = context.first(node)
        # What one change makes possible may need the other one, too.
        for form in (_without_batch, _with_half_tables, _with_both):
            changed = form(node, called.arguments, views)
            if changed and _changes_kernel(called, changed, kernel, context.first):
                called, kernel = OpCall(called.op, node, arguments_of(node)), context.first(node)
                fired.append(Fired(NAME, node))
    for view in reversed(views.values()):
        if not view.users:
            gm.graph.erase_node(view)
    return fired


def _without_batch(node: Node, arguments: Arguments, views: Views) -> Arguments:
    """The arguments [1, T, ...] as [T, ...]; none where a batch may have several sequences."""
    batched = {
        name: x
        for name in ("q", "k", "v", "cos", "sin")
        if isinstance(x := arguments.get(name), Node) and value(x).dim() == 4
    }
    if not all(known_equal(value(x).shape[0], 1) for x in batched.values()):
        return {}
    for x in batched.values():
        if ("rows", x) not in views:
            views["rows", x] = insert(node, aten.squeeze.dim, x, 0)
    return {name: views["rows", x] for name, x in batched.items()}


def _with_half_tables(node: Node, arguments: Arguments, views: Views) -> Arguments:
    """The first half of equal ones, and the style for these."""
    tables = {name: x for name in ("cos", "sin") if isinstance(x := arguments.get(name), Node)}
    if arguments.get("rope_style") != "neox" or not all(map(_repeats_angles, tables.values())):
        return {}
    for table in tables.values():
        if ("half", table) not in views:
            half = value(table).shape[-1] // 2
            views["half", table] = insert(node, aten.slice.Tensor, table, -1, 0, half)
    return {"rope_style": "half", **{name: views["half", x] for name, x in tables.items()}}


def _with_both(node: Node, arguments: Arguments, views: Views) -> Arguments:
    rows = _without_batch(node, arguments, views)
    half = _with_half_tables(node, {**arguments, **rows}, views)
    return {**rows, **half} if rows and half else {}


def _repeats_angles(table: Node) -> bool:
    """Whether it is a view of whole rows of a table that has all angles twice."""
    base, rows = storage(table), value(table)
    if base.target is not operator.getitem:
        return False
    tables = op_call(base.all_input_nodes[0])
    if tables is None or tables.op is not ops.rotary_tables or tables.arguments["style"] != "neox":
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


def _changes_kernel(
    called: OpCall,
    changed: Arguments,
    kernel: Kernel | None,
    first: Callable[[Node], Kernel | None],
) -> bool:
    """Change arguments of a call, which this kernel serves, if another one serves it then."""
    node = called.node
    args, kwargs, before = node.args, node.kwargs, value(node)
    bound = called.bound(**changed)
    node.args, node.kwargs = bound.args, bound.kwargs
    infer(node)
    if first(node) is kernel or not _lies_as(value(node), before):
        node.args, node.kwargs, node.meta["val"] = args, kwargs, before
        return False
    for part in [user for user in node.users if user.target is operator.getitem]:
        old = value(part)
        infer(part)
        if value(part).dim() < old.dim():
            batch = _batch_of(part)
            if not same_strides(value(batch), old):
                spread_strides(node.graph, batch, old, Values(node.graph))
    return True


def _batch_of(rows: Node) -> Node:
    """A batch of one, which the readers of the rows get."""
    batch = insert(rows.next, aten.unsqueeze.default, rows, 0)
    rows.replace_all_uses_with(batch, delete_user_cb=lambda user: user is not batch)
    return batch


def _lies_as(result: Value, before: Value) -> bool:
    """Whether a result lies in memory as before, up to a batch of one."""
    if isinstance(before, list | tuple):
        assert isinstance(result, list | tuple)
        return all(map(_lies_as, result, before))
    assert isinstance(result, Tensor) and isinstance(before, Tensor)
    rows = result if result.dim() == before.dim() else result[None]
    steps = zip(before.shape, rows.stride(), before.stride(), strict=True)
    return all(known_equal(size, 1) or known_equal(a, b) for size, a, b in steps)
