"""Write keys and values into a dense static cache (transformers' StaticCache) by one kernel, with
the norm and the rotation before it.

    qk_norm_rope -+-> q                                    q -+
                  +-> k > index_copy_(k_cache)     =>         qk_norm_rope_kv_write > q
    v > index_copy_(v_cache)                            k, v -+

A cache [B, K, S, D] is one of B blocks [S, K, D], transposed. Where nothing that kv_write fuses
with is before it, it is by itself. The slot of one token is the length of the cache, a counter,
which kernels read as it is. Attention reads the caches behind the write, as before.

A kernel must serve the write. On a CPU Inductor compiles the copies.
"""

import operator
from collections.abc import Iterator, Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import Argument

from atomc import ops
from atomc.graph.canonical import call, value
from atomc.graph.edit import insert
from atomc.graph.mutation import mutated, storage
from atomc.graph.op_call import arguments_of, called_op
from atomc.graph.provenance import inherited
from atomc.graph.sizes import known_equal, same_sizes
from atomc.ops.op import Op
from atomc.rewriting.graph_pass import Change, Context
from atomc.rewriting.matching.near_miss import NearMiss
from atomc.rewriting.matching.pattern import Difference
from atomc.rewriting.rewrite import Fired

NAME = "static_cache"
LAYOUTS = (None, "paged")  # of the option
aten = torch.ops.aten


def static_cache(gm: GraphModule, context: Context) -> Iterator[Change]:
    """Replace the copies into the caches of each layer."""
    if context.first is None or context.platform.is_cpu or context.options.layout not in LAYOUTS:
        return
    writers = _first_writers(gm.graph)
    for keys, values in list(_pairs(gm.graph)):
        site = _Site(keys, values, writers, context)
        if not any(_is_overwritten(copy, site) for copy in (keys, values)):
            yield Change(values, partial(_miss, site), partial(_replace, site))


class _Site(NamedTuple):
    """The copies of new keys and of values, in graph order. writers: of the graph, by input."""

    keys: Node
    values: Node
    writers: Mapping[Node, Node]
    context: Context


class _Rotation(NamedTuple):
    """What computes the keys of a write: the op that does both, its arguments, and the rotated
    queries that it returns.
    """

    op: Op
    arguments: Mapping[str, Argument]
    q: Node


def _first_writers(graph: Graph) -> dict[Node, Node]:
    """The first node that writes each tensor."""
    writers: dict[Node, Node] = {}
    for node in graph.nodes:
        for target in mutated(node):
            writers.setdefault(storage(target), node)
    return writers


def _pairs(graph: Graph) -> Iterator[tuple[Node, Node]]:
    """Copies to the same positions of two caches that are equal but for their widths, where nothing
    in between reads or writes the first.
    """
    first: Node | None = None
    for node in graph.nodes:
        if first is not None and _fills(node) and _is_pair(first, node):
            yield first, node
            first = None
        elif _fills(node):
            first = node
        elif first is not None and _node(first.args[0]) in map(storage, node.all_input_nodes):
            first = None


def _fills(node: Node) -> bool:
    """Whether it copies new tokens into a cache [B, K, S, D] that is an input."""
    if node.target is not aten.index_copy_.default:
        return False
    cache, dim, index = _node(node.args[0]), node.args[1], _node(node.args[2])
    is_cache = cache.op == "placeholder" and value(cache).dim() == 4
    return is_cache and dim in (2, -2) and value(index).dim() == 1


def _is_pair(keys: Node, values: Node) -> bool:
    caches = _node(keys.args[0]), _node(values.args[0])
    k_cache, v_cache = map(value, caches)
    return (
        caches[0] is not caches[1]
        and keys.args[2] is values.args[2]
        and k_cache.dtype == v_cache.dtype
        and same_sizes(k_cache.shape[:-1], v_cache.shape[:-1])
    )


def _miss(site: _Site, difference: Difference) -> NearMiss:
    nodes = {site.keys, site.values}
    return NearMiss(NAME, "", site.values, 2, 2, edits=0, differences=[difference], nodes=nodes)


def _replace(site: _Site) -> Fired | NearMiss:
    """Write by the op that computes most, of those that a kernel serves."""
    write = _kv_write(site)
    replaced = [site.keys, site.values]
    if (fused := _fused(write, site)) is not None:
        new, rotated = fused
        replaced += rotated
        write.graph.erase_node(write)
    elif _is_served(write, site.context):
        new = write
    else:
        write.graph.erase_node(write)
        expected = "a kernel that writes to these caches"
        return _miss(site, Difference("guard", expected, "none", site.values))
    consumed = tuple(call(node).op for node in replaced)
    new.meta.update(inherited(replaced, site.values, NAME, consumed))
    for copy in (site.keys, site.values):
        copy.graph.erase_node(copy)
    return Fired(NAME, site.values, {"op": called_op(new).name}, {*replaced}, [new], consumed)


def _fused(write: Node, site: _Site) -> tuple[Node, list[Node]] | None:
    """The op that rotates and writes, and what it replaces before the write; None if no kernel
    serves one.
    """
    rotation = _rotation(write, site)
    if rotation is None:
        return None
    op, q = rotation.op, rotation.q
    bound = op.signature.bind(
        **{name: rotation.arguments[name] for name in op.signature.parameters}
    )
    fused = insert(site.values, op.overload, *bound.args, **bound.kwargs)
    if _is_overwritten(fused, site) or not _is_served(fused, site.context):
        fused.graph.erase_node(fused)
        return None
    q.replace_all_uses_with(insert(site.values, operator.getitem, fused, 0))
    return fused, [q, _node(write.args[0])]


def _is_served(node: Node, context: Context) -> bool:
    """Whether a kernel runs this node; one that waits for the device is for correctness alone."""
    assert context.first is not None
    kernel = context.first(node)
    return kernel is not None and kernel.layout == "paged" and not kernel.syncs


def _kv_write(site: _Site) -> Node:
    """The write of both, in front of the copy of values."""
    before = site.values
    rows = [_tokens_first(_node(copy.args[3]), before) for copy in (site.keys, site.values)]
    caches = [
        insert(before, aten.transpose.int, copy.args[0], 1, 2) for copy in (site.keys, site.values)
    ]
    return insert(before, ops.kv_write.overload, *rows, *caches, _slots(site))


def _tokens_first(rows: Node, before: Node) -> Node:
    """Rows [B, K, T, D] as [B, T, K, D]."""
    if rows.target is aten.transpose.int and {*rows.args[1:]} == {1, 2}:
        return _node(rows.args[0])
    return insert(before, aten.transpose.int, rows, 1, 2)


def _slots(site: _Site) -> Node:
    """The positions; the only position 0 + counter is read from the counter."""
    index = _node(site.keys.args[2])
    if (
        index.target is aten.add.Tensor
        and not index.kwargs
        and known_equal(value(index).shape[0], 1)
    ):
        for zero, counter in (index.args, index.args[::-1]):
            if _is_zero(zero) and _is_position(counter) and not _is_written(counter, site):
                return insert(site.values, aten.view.default, counter, [1])
    return index


def _is_zero(argument: Argument) -> bool:
    """Whether it is arange(1)."""
    return (
        isinstance(argument, Node)
        and argument.target is aten.arange.default
        and argument.args == (1,)
    )


def _is_position(argument: Argument) -> bool:
    """Whether it is an input of one position."""
    if not isinstance(argument, Node) or argument.op != "placeholder":
        return False
    return value(argument).dtype == torch.int64 and not value(argument).shape


def _is_overwritten(node: Node, site: _Site) -> bool:
    """Whether operands other than the caches may have other values at the last copy."""
    caches = site.keys.args[0], site.values.args[0]
    operands = map(storage, node.all_input_nodes)
    return any(_is_written(operand, site) for operand in operands if operand not in caches)


def _is_written(argument: Argument, site: _Site) -> bool:
    """Whether a node before the last copy writes to a tensor."""
    writer = site.writers.get(_node(argument))
    return writer is not None and writer < site.values


def _rotation(write: Node, site: _Site) -> _Rotation | None:
    """The rotation of the keys, perhaps behind their norm, if its queries are read behind the write
    only, and its keys by nothing else.
    """
    k, source, arguments = _node(write.args[0]), _node(site.keys.args[3]), arguments_of(write)
    if {*k.users, *source.users} - {source} != {write, site.keys}:
        return None
    rotation: _Rotation | None = None
    if k.target is ops.rope.overload:
        rotation = _rope(k, arguments, _node(site.keys.args[0]))
    elif k.target is operator.getitem and k.args[1] == 1:
        norm = _node(k.args[0])
        q = next((part for part in norm.users if part.args[1] == 0), None)
        if norm.target is ops.qk_norm_rope.overload and q is not None:
            op = ops.qk_norm_rope_kv_write
            rotation = _Rotation(op, {**arguments, **arguments_of(norm)}, q)
    if rotation is None or any(reader < site.values for reader in rotation.q.users):
        return None
    return rotation


def _rope(k: Node, arguments: Mapping[str, Argument], cache: Node) -> _Rotation | None:
    """The rotation of keys and of the queries of the attention that reads their cache."""
    keys = arguments_of(k)
    for attention in _attentions(cache):
        q = storage(_node(arguments_of(attention)["q"]))
        if q.target is ops.rope.overload:
            queries = arguments_of(q)
            if {**queries, "x": None} == {**keys, "x": None}:
                rows = {"q": queries["x"], "k": keys["x"], "rope_style": keys["style"]}
                return _Rotation(ops.rope_kv_write, {**keys, **arguments, **rows}, q)
    return None


def _attentions(view: Node) -> Iterator[Node]:
    """The calls of attention that read the keys of a cache or of a view of it."""
    for reader in view.users:
        if reader.target is ops.attention.overload and reader.args[1] is view:
            yield reader
        elif storage(reader) is storage(view):
            yield from _attentions(reader)


def _node(argument: Argument) -> Node:
    assert isinstance(argument, Node)
    return argument
