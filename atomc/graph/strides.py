"""When a node comes to lie differently in memory, what lies behind it has other strides, too."""

import heapq
from collections.abc import Hashable, Mapping

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Graph, Node
from torch.fx.node import Argument

from atomc.graph.canonical import Value, value
from atomc.graph.expressions import expression
from atomc.graph.sizes import known_equal
from atomc.torch_compat.tracing import fake_mode_of, without_new_guards

aten = torch.ops.aten


Call = tuple[OpOverload, tuple[Argument, ...], dict[str, Argument]]


class Values:
    """Computes values of nodes on fake tensors. Layers of a model are alike: what they have in
    common is computed once.
    """

    def __init__(self, graph: Graph):
        mode = fake_mode_of(graph)
        assert mode is not None
        self.mode = mode
        self.known: dict[Hashable, Value] = {}

    def of(self, node: Node, changed: Mapping[Node, Value] | None = None) -> Value:
        """What the node returns, given those of its inputs that have changed. Raises what its
        function raises.
        """
        args, kwargs = torch.fx.node.map_arg(
            (node.args, node.kwargs), lambda n: (changed or {}).get(n, value(n))
        )
        key = (node.target, _key(args), _key(kwargs))
        if key not in self.known:
            with self.mode, torch.no_grad(), without_new_guards(self.mode):
                self.known[key] = node.target(*args, **kwargs)  # type: ignore[operator]
        return self.known[key]


def _key(given: Value | Argument) -> Hashable:
    """Equal for what looks equal to a fake kernel."""
    if isinstance(given, Tensor):
        return (
            given.dtype,
            given.device,
            _key(given.shape),
            _key(given.stride()),
            _key(given.storage_offset()),
        )
    if isinstance(given, list | tuple):
        return tuple(map(_key, given))
    if isinstance(given, dict):
        return tuple((name, _key(part)) for name, part in given.items())
    return expression(given) if isinstance(given, torch.SymInt) else (type(given), given)


def spread_strides(graph: Graph, node: Node, before: Tensor, values: Values) -> None:
    """Recompute the values behind a node that has new strides. Where these would be seen outside of
    the graph, or a view cannot be had with them, readers get a copy that lies as the node's value
    did before.
    """
    changed = values_behind(node, value(node), values)
    if changed is not None:
        for reader, new in changed.items():
            reader.meta["val"] = new
        return
    readers, last = list(node.users), node
    for target, args, kwargs in _copy_lying_like(before):
        with graph.inserting_after(last):
            last = graph.call_function(target, (last, *args), kwargs)
        last.meta.update({key: item for key, item in node.meta.items() if key != "canonical"})
        last.meta["val"] = values.of(last)
    for reader in readers:
        reader.replace_input_with(node, last)


def _copy_lying_like(example: Tensor) -> list[Call]:
    """The calls, one after the other, that make a dense copy with its dimensions in the order of
    the example's strides.
    """
    dims = list(range(example.dim()))
    strides = [expression(stride) for stride in example.stride()]
    order = sorted(
        dims, key=lambda dim: -strides[dim].subs(dict.fromkeys(strides[dim].free_symbols, 8))
    )
    clone: Call = (aten.clone.default, (), {"memory_format": torch.contiguous_format})
    if order == dims:
        return [clone]
    back = [order.index(dim) for dim in dims]
    return [(aten.permute.default, (order,), {}), clone, (aten.permute.default, (back,), {})]


def values_behind(start: Node, now: Tensor, values: Values) -> dict[Node, Value] | None:
    """The values that change when a node's strides are those of `now`; None if one is returned or
    cannot be like that.
    """
    changed: dict[Node, Value] = {start: now}
    waiting = list(start.users)
    heapq.heapify(waiting)
    while waiting:
        node = heapq.heappop(waiting)
        if node in changed:
            continue
        if node.op != "call_function" or node.target is aten.as_strided.default:
            return None
        if node.target is aten.view.default and _is_expanded(changed.get(node.args[0])):  # type: ignore[arg-type]
            return None  # fake kernels take views for possible here that are not (torch 2.13)
        try:
            new = values.of(node, changed)
        except (
            Exception
        ):  # a view that this layout does not allow, or a size that decides and is not known
            return None
        if not same_strides(new, value(node)):
            changed[node] = new
            for reader in node.users:
                heapq.heappush(waiting, reader)
    return changed


def _is_expanded(x: Value) -> bool:
    """Whether elements of a tensor may lie in one place."""
    return isinstance(x, Tensor) and any(
        known_equal(stride, 0) and not known_equal(size, 1)
        for size, stride in zip(x.shape, x.stride(), strict=True)
    )


def same_strides(a: Value, b: Value) -> bool:
    """True only if two values of one shape are known to lie alike in memory."""
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return all(map(same_strides, a, b))
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return all(known_equal(m, n) for m, n in zip(a.stride(), b.stride(), strict=True))
    return not isinstance(a, Tensor | list | tuple)  # numbers have no strides
