"""Propagates the new strides of a node to the nodes that depend on it."""

import heapq
from collections.abc import Hashable, Mapping

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Graph, Node
from torch.fx.node import Argument

from atomc.graph.canonical import Value, value
from atomc.graph.expressions import expression
from atomc.graph.sizes import known_equal, same_sizes
from atomc.torch_compat.tracing import fake_mode_of, without_new_guards

aten = torch.ops.aten


_NewCall = tuple[OpOverload, tuple[Argument, ...], dict[str, Argument]]


class Values:
    """Computes values of nodes on fake tensors, with a cache: layers of a model repeat the same
    calls.
    """

    def __init__(self, graph: Graph):
        mode = fake_mode_of(graph)
        assert mode is not None
        self.mode = mode
        self.known: dict[Hashable, Value] = {}

    def of(self, node: Node, changed: Mapping[Node, Value] | None = None) -> Value:
        """The value of the node with changed values of inputs. Raises the errors of its
        function.
        """
        args, kwargs = torch.fx.node.map_arg(
            (node.args, node.kwargs), lambda n: (changed or {}).get(n, value(n))
        )
        key = (node.target, _key(args), _key(kwargs))
        if key not in self.known:
            with self.mode, torch.no_grad(), without_new_guards(self.mode):
                self.known[key] = node.target(*args, **kwargs)  # type: ignore[operator]
        return self.known[key]


def _key(value: Value | Argument) -> Hashable:
    """A key that is equal for values that a fake kernel cannot distinguish."""
    if isinstance(value, Tensor):
        return (
            value.dtype,
            value.device,
            _key(value.shape),
            _key(value.stride()),
            _key(value.storage_offset()),
        )
    if isinstance(value, list | tuple):
        return tuple(map(_key, value))
    if isinstance(value, dict):
        return tuple((name, _key(part)) for name, part in value.items())
    return expression(value) if isinstance(value, torch.SymInt) else (type(value), value)


def spread_strides(graph: Graph, node: Node, before: Tensor, values: Values) -> None:
    """Recompute the values that depend on a node with new strides. If an output of the graph or an
    impossible view depends on them, readers get a copy with the previous strides.
    """
    changed = values_behind(node, value(node), values)
    if changed is not None:
        for reader, new in changed.items():
            reader.meta["val"] = new
        return
    readers, last = list(node.users), node
    for target, args, kwargs in _copy_with_strides_of(before):
        with graph.inserting_after(last):
            last = graph.call_function(target, (last, *args), kwargs)
        last.meta.update(node.meta)
        last.meta["val"] = values.of(last)
    for reader in readers:
        reader.replace_input_with(node, last)


def _copy_with_strides_of(example: Tensor) -> list[_NewCall]:
    """The calls that make a dense copy with dimensions in the order of the example's strides."""
    dims = list(range(example.dim()))
    strides = [expression(stride) for stride in example.stride()]
    order = sorted(
        dims, key=lambda dim: -strides[dim].subs(dict.fromkeys(strides[dim].free_symbols, 8))
    )
    clone: _NewCall = (aten.clone.default, (), {"memory_format": torch.contiguous_format})
    if order == dims:
        return [clone]
    back = [order.index(dim) for dim in dims]
    return [(aten.permute.default, (order,), {}), clone, (aten.permute.default, (back,), {})]


def values_behind(start: Node, now: Tensor, values: Values) -> dict[Node, Value] | None:
    """The values that change if the node has the value `now`; None if one of them is an output of
    the graph or cannot be computed.
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
            return None  # the fake kernel accepts views that real kernels refuse (torch 2.13)
        try:
            new = values.of(node, changed)
        except Exception:  # an impossible view, or a branch on an unknown size
            return None
        if not same_strides(new, value(node)):
            changed[node] = new
            for reader in node.users:
                heapq.heappush(waiting, reader)
    return changed


def _is_expanded(x: Value) -> bool:
    """Whether several elements of a tensor may share memory."""
    return isinstance(x, Tensor) and any(
        known_equal(stride, 0) and not known_equal(size, 1)
        for size, stride in zip(x.shape, x.stride(), strict=True)
    )


def same_strides(a: Value, b: Value) -> bool:
    """True only if two values of one shape are known to have equal strides."""
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return all(map(same_strides, a, b))
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return same_sizes(a.stride(), b.stride())
    return not isinstance(a, Tensor | list | tuple)  # numbers have no strides
