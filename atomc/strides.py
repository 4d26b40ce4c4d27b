"""When a node comes to lie differently in memory, what lies behind it has other strides, too."""

import heapq
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from atomc.canonical import value
from atomc.sizes import known_equal
from atomc.torch_compat import fake_mode_of, without_new_guards

aten = torch.ops.aten


def spread_strides(graph: Graph, node: Node, before: Tensor) -> None:
    """Recompute the values behind a node that has new strides. Where these would be seen outside of the graph, or a view
    cannot be had with them, readers get a contiguous copy, which is what the node's value was before."""
    values = _behind(graph, node)
    if values is not None:
        for reader, new in values.items():
            reader.meta["val"] = new
        return
    with graph.inserting_after(node):
        copy = graph.call_function(aten.clone.default, (node,), {"memory_format": torch.contiguous_format})
    node.replace_all_uses_with(copy, delete_user_cb=lambda reader: reader is not copy)
    copy.meta.update({key: item for key, item in node.meta.items() if key != "canonical"}, val=before)


def _behind(graph: Graph, start: Node) -> dict[Node, Any] | None:
    """The values that change with the strides of a node; None if one of them is returned or cannot be like that."""
    mode = fake_mode_of(graph)
    assert mode is not None
    values: dict[Node, Any] = {start: value(start)}
    waiting = list(start.users)
    heapq.heapify(waiting)
    while waiting:
        node = heapq.heappop(waiting)
        if node in values:
            continue
        if node.op != "call_function" or node.target is aten.as_strided.default:
            return None
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: values.get(n, value(n)))
        try:
            with mode, torch.no_grad(), without_new_guards(mode):
                new = node.target(*args, **kwargs)  # type: ignore[operator]
        except Exception:  # a view that this layout does not allow, or a size that decides and is not known
            return None
        if not _same_strides(new, value(node)):
            values[node] = new
            for reader in node.users:
                heapq.heappush(waiting, reader)
    return values


def _same_strides(a: Any, b: Any) -> bool:
    if isinstance(a, list | tuple):
        return all(map(_same_strides, a, b))
    return not isinstance(a, Tensor) or all(known_equal(m, n) for m, n in zip(a.stride(), b.stride(), strict=True))
