"""Write inputs in place, so that no copy of a whole cache remains.

    v = index_copy(P, ...);  ... v ...;  copy_(P, v)    =>    index_copy_(P, ...);  ... P ...

Calls of ops that write to their operands are changed first (reinplace_calls.py).
P is a graph input. Allowed if no later node than v reads P or a view of it, and P is not another
operand of v. If P and v have different strides, a traced view of v may become a copy, so v must not
be part of a returned tensor.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from atomc.graph.canonical import Value, value
from atomc.graph.mutation import storage, views_of
from atomc.graph.sizes import same_shape
from atomc.graph.strides import Values, same_strides, values_behind
from atomc.passes.reinplace_calls import reinplace_calls
from atomc.rewriting.graph_pass import Context, Outcome
from atomc.rewriting.rewrite import Fired

aten = torch.ops.aten
IN_PLACE = {
    aten.index_copy.default: aten.index_copy_.default,
    aten.index_put.default: aten.index_put_.default,
    aten.index_add.default: aten.index_add_.default,
    aten.scatter.src: aten.scatter_.src,
    aten.scatter.value: aten.scatter_.value,
    aten.add.Tensor: aten.add_.Tensor,
    aten.mul.Tensor: aten.mul_.Tensor,
}


def reinplace(gm: GraphModule, context: Context) -> Outcome:
    """Replace copies into an input by the in-place form of the op that computed the value."""
    graph = gm.graph
    fired = reinplace_calls(graph)
    values = Values(graph)
    position = {node: i for i, node in enumerate(graph.nodes)}
    returned = {storage(node) for node in graph.output_node().all_input_nodes}
    for copy, target, new in _copies_back(graph):
        if _last_reader(target, copy, position) > position[new]:
            continue
        changed = _changed(target, new, returned, values)
        if changed is None or not _made_in_place(graph, target, new):
            continue
        for reader, new_value in changed.items():
            if reader is not new:
                reader.meta["val"] = new_value
        new.replace_all_uses_with(target)
        graph.erase_node(copy)
        fired.append(Fired("reinplace", new, {"input": target.name}))
    return Outcome(fired)


def _copies_back(graph: Graph) -> Iterator[tuple[Node, Node, Node]]:
    """Copies of a new value into a whole input: (copy, input, value), current when yielded."""
    for copy in list(graph.find_nodes(op="call_function", target=aten.copy_.default)):
        target, new = copy.args
        if not isinstance(target, Node) or not isinstance(new, Node) or copy.users:
            continue
        if target.op == "placeholder" and _same_kind(value(target), value(new)):
            yield copy, target, new


def _changed(
    target: Node, new: Node, returned: set[Node], values: Values
) -> dict[Node, Value] | None:
    """The nodes whose values change strides if the new value has those of the input, None if that
    is not possible.
    """
    if same_strides(value(target), value(new)):
        return {}
    return None if new in returned else values_behind(new, value(target), values)


def _made_in_place(graph: Graph, target: Node, new: Node) -> bool:
    """Let the op that computes the new value write into the input; False if it has no such form."""
    if new.target in IN_PLACE and new.args[0] is target and target not in new.args[1:]:
        new.target = IN_PLACE[new.target]
        new.meta["val"] = value(target)
        return True
    if (
        new.target is aten.slice_scatter.default
        and new.args[0] is target
        and new.args[1] is not target
    ):
        _write_slice(graph, new, target)
        return True
    return False


def _same_kind(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.device == b.device and same_shape(a, b)


def _last_reader(target: Node, but: Node, position: dict[Node, int]) -> int:
    """The position of the last node that reads the input or a view of it."""
    readers = (user for view in views_of(target) for user in view.users)
    return max((position[node] for node in readers if node is not but), default=-1)


def _write_slice(graph: Graph, node: Node, target: Node) -> None:
    """slice_scatter(P, part, dim, start, end, step) becomes copy_(slice(P, dim, ...), part)."""
    part, where = node.args[1], (*node.args[2:], *node.kwargs.values())
    with graph.inserting_before(node):
        view = graph.call_function(aten.slice.Tensor, (target, *where))
        view.meta.update(node.meta, val=value(part))  # type: ignore[arg-type]
    node.target, node.args, node.kwargs = aten.copy_.default, (view, part), {}
    node.meta["val"] = value(part)  # type: ignore[arg-type]
