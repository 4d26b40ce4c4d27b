"""Merge linear layers with one input: their parameters are packed, and the result is split.

       +- linear(q_proj) -> q                                                  +-> q
    x -+- linear(k_proj) -> k    =>    x - linear(packed) - split_with_sizes --+-> k
       +- linear(v_proj) -> v                                                  +-> v

The packed parameters are new inputs of the graph: `packed` of their records is a PackedInput, see
atomc.weights.packed. Any op whose `concat` allows it is merged, within a layer of the model.
Results differ only by the order of additions in a wider matrix product.

A packed weight of 16 bits has rows of zeros up to a multiple of ALIGNED_ROWS, so that the rows of
the result start at multiples of 16 bytes: the split leaves their columns out.
"""

import math
import operator
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import Argument

from atomc.graph.canonical import VIEWS, call, input_name, value
from atomc.graph.edit import add_input
from atomc.graph.node_record import NodeRecord, record_of
from atomc.graph.op_call import OpCall, kind_of, op_call
from atomc.graph.provenance import inherited, layer_of, module_path
from atomc.graph.strides import Values, spread_strides
from atomc.ops.op_traits import Kind
from atomc.report.records import MissKind
from atomc.rewriting.graph_pass import Change, Context, Pass
from atomc.rewriting.matching.near_miss import NearMiss
from atomc.rewriting.matching.pattern import Difference
from atomc.rewriting.rewrite import Fired
from atomc.torch_compat.core import Input
from atomc.weights import packed as packed_weights
from atomc.weights.packed import PackedInput

aten = torch.ops.aten
# Products of attention written in PyTorch.
PRODUCTS = ("bmm", "baddbmm", "matmul")
# Ops between the projections of queries, keys and values and attention, besides norms and rotary
# positions.
ON_THE_WAY = VIEWS | {
    "permute",
    "slice",
    "expand",
    "unsqueeze",
    "cat",
    "cast",
    "add",
    "mul",
    "neg",
    "getitem",
}

# cuBLAS has no fast kernel for results whose rows start at other addresses, such as those of 257
# outputs (a router and the gate of a shared expert).
ALIGNED_ROWS = 8

_SHARED = "parameters that can share one memory"
# Placeholder -> its value.
Real = Mapping[Node, Input]


Refused = tuple[Node, MissKind, str]


def merging(kind: str, after: Sequence[str]) -> Pass:
    """The pass that merges the groups of a kind: "merge_qkv", "merge_gate_up" or, for all others,
    "merge_linears".
    """

    def run(gm: GraphModule, context: Context) -> Iterator[Change | NearMiss]:
        real = dict(zip(gm.graph.find_nodes(op="placeholder"), context.inputs, strict=False))
        if not real:
            return
        values = Values(gm.graph)
        for group in _groups(gm.graph):
            if _kind([linear.node for linear in group]) == kind:
                mergeable, refused = _mergeable(group, real)
                for part, names in mergeable:
                    merge = partial(_merge, gm.graph, part, names, kind, values)
                    yield Change(part[0].node, partial(_miss, kind, part), merge)
                for node, of, why in refused:
                    yield _miss(kind, group, Difference(of, _SHARED, why, node))

    return Pass(kind, run, after=after, by_site=True)


def _groups(graph: Graph) -> list[list[OpCall]]:
    """Calls with the same input, in the same layer, with the same optional arguments given."""
    groups: dict[Hashable, list[OpCall]] = {}
    for node in graph.nodes:
        linear = op_call(node)
        if linear is not None and linear.op.concat is not None:
            present = tuple(name for name, x in linear.arguments.items() if x is not None)
            x = next(iter(linear.arguments.values()))
            key = (linear.op.name, x, layer_of(module_path(node)), present)
            groups.setdefault(key, []).append(linear)
    return [_gate_first(group) for group in groups.values() if len(group) > 1]


def _parameter(linear: OpCall, name: str, real: Real) -> nn.Parameter:
    parameter = real[linear[name]]
    assert isinstance(parameter, nn.Parameter)
    return parameter


def _gate_first(group: list[OpCall]) -> list[OpCall]:
    """The gate first: the order that kernels for gate and up expect."""
    gated = _gated([linear.node for linear in group])
    return (
        sorted(group, key=lambda linear: gated.index(linear.node))
        if len(gated) == len(group)
        else group
    )


def _kind(nodes: Sequence[Node]) -> str:
    if len(nodes) == 2 and _gated(nodes):
        return "merge_gate_up"
    return (
        "merge_qkv" if len(nodes) == 3 and all(map(_reaches_attention, nodes)) else "merge_linears"
    )


def _reaches_attention(node: Node) -> bool:
    return any(
        kind_of(reader) is Kind.ATTENTION or call(reader).op in PRODUCTS
        for reader in _readers(node, _leads_to_attention)
    )


def _leads_to_attention(node: Node) -> bool:
    return (
        call(node).op in ON_THE_WAY
        or kind_of(node) in (Kind.NORM, Kind.ROPE)
        or Kind.ADAPTER in kind_of(node)
    )


def _gated(nodes: Sequence[Node]) -> list[Node]:
    """Gate and up, if a gated activation reads two of the nodes."""
    for reader in _readers(
        nodes[0], lambda node: call(node).op in VIEWS or Kind.ADAPTER in kind_of(node)
    ):
        if kind_of(reader) is Kind.GATE:
            pair = [_skip_adapters(operand) for operand in call(reader).operands]
            if len(set(pair) & set(nodes)) == 2:
                return pair
    return []


def _skip_adapters(node: Node) -> Node:
    """The linear layer that views and adapters change."""
    while call(node).op in VIEWS or Kind.ADAPTER in kind_of(node):
        node = call(node).operands[0]
    return node


def _readers(node: Node, through: Callable[[Node], bool]) -> Iterator[Node]:
    """The readers of a node, directly or through other readers."""
    waiting, seen = list(node.users), set(node.users)
    while waiting:
        reader = waiting.pop()
        yield reader
        if through(reader):
            waiting += [further for further in reader.users if further not in seen]
            seen |= set(reader.users)


def _mergeable(
    group: list[OpCall], real: Real
) -> tuple[list[tuple[list[OpCall], tuple[str, ...]]], list[Refused]]:
    """The parts of a group to merge, each with the names of the arguments to pack; and the other
    calls, with the reason.
    """
    assert group[0].op.concat is not None
    names = group[0].op.concat([linear.values for linear in group])
    if isinstance(names, str):
        return [], [(group[0].node, "guard", names)]
    fit: list[OpCall] = []
    refused: list[Refused] = []
    for linear in group:
        reason = next(
            (reason for name in names if (reason := _unfit(linear.arguments[name], real))), None
        )
        if reason is None and not isinstance(value(linear.node).shape[-1], int):
            reason = "its width is not constant"
        if reason:
            refused.append((linear.node, "guard", reason))
        else:
            fit.append(linear)
    parts, elsewhere = _group_as_packed(fit, names[0], real)
    refused += elsewhere
    mergeable = []
    for part in parts:
        different = _different(part, names, real)
        if different:
            refused.append((part[0].node, *different))
        else:
            mergeable.append((part, names))
    return mergeable, refused


def _unfit(argument: Argument, real: Real) -> str | None:
    """Why this argument of a call cannot be packed, or None."""
    if not isinstance(argument, Node) or argument.op != "placeholder" or argument not in real:
        return "its weight is computed in the graph"
    if len(argument.users) > 1:
        return f"{input_name(argument)} has other readers"
    reason = packed_weights.unpackable(real[argument])
    return f"{input_name(argument)}: {reason}" if reason else None


def _group_as_packed(
    group: list[OpCall], name: str, real: Real
) -> tuple[list[list[OpCall]], list[Refused]]:
    """The calls to merge with each other: as an earlier graph has packed their parameters, and all
    others together.
    """
    together_before: list[list[OpCall]] = []
    others: list[OpCall] = []
    refused: list[Refused] = []
    by_parameter = {id(_parameter(linear, name, real)): linear for linear in group}
    for linear in group:
        parts = packed_weights.packed_together(_parameter(linear, name, real))
        together = [by_parameter.get(id(parameter)) for parameter in parts]
        here = [other for other in together if other is not None]
        if not together:
            others.append(linear)
        elif len(here) < len(together):
            reason = f"{input_name(linear[name])} is packed with others for another graph"
            refused.append((linear.node, "packed", reason))
        elif here not in together_before:
            together_before.append(here)
    return together_before + ([others] if len(others) > 1 else []), refused


def _different(
    group: list[OpCall], names: tuple[str, ...], real: Real
) -> tuple[MissKind, str] | None:
    """Why these cannot be merged with each other, or None."""
    rest = [name for name in group[0].arguments if name not in names]
    differing = [
        name
        for name in rest
        if any(other.arguments[name] != group[0].arguments[name] for other in group)
    ]
    if differing:
        return "guard", f"they differ in {', '.join(differing)}"
    for name in names:
        parameters = [_parameter(linear, name, real) for linear in group]
        if reason := packed_weights.mismatch(parameters):
            return "guard", reason
        if reason := packed_weights.packed_with_others(parameters):
            return "packed", reason
    return None


def _miss(kind: str, group: list[OpCall], difference: Difference) -> NearMiss:
    node = difference.node
    assert node is not None
    return NearMiss(
        kind,
        "",
        node,
        len(group) - 1,
        len(group),
        0,
        [difference],
        {linear.node for linear in group},
    )


def _merge(
    graph: Graph, group: list[OpCall], names: tuple[str, ...], kind: str, values: Values
) -> Fired:
    nodes = [linear.node for linear in group]
    first = min(nodes)
    widths = [value(node).shape[-1] for node in nodes]
    zero_rows = _zero_rows(group[0], sum(widths))
    packed = {
        name: packed_input(graph, [linear[name] for linear in group], zero_rows) for name in names
    }
    split_at = [*widths, zero_rows] if zero_rows else widths
    with graph.inserting_before(first):
        bound = group[0].bound(**packed)
        merged = graph.call_function(group[0].op.overload, bound.args, bound.kwargs)
        split = graph.call_function(aten.split_with_sizes.default, (merged, split_at, -1))
        parts = [graph.call_function(operator.getitem, (split, i)) for i in range(len(nodes))]
    for node_of_all in (merged, split):
        node_of_all.meta.update(inherited(nodes, first, kind))
        node_of_all.meta["val"] = values.of(node_of_all)
    for i, (node, part) in enumerate(zip(nodes, parts, strict=True)):
        part.meta.update(node.meta, val=value(split)[i])
        node.replace_all_uses_with(part)
        graph.erase_node(node)
        spread_strides(graph, part, value(node), values)
    attrs = {"widths": widths} | ({"zero_rows": zero_rows} if zero_rows else {})
    return Fired(kind, nodes[0], attrs, set(nodes), [merged, split, *parts])


def _zero_rows(linear: OpCall, rows: int) -> int:
    """How many rows of zeros the packed weight of such linears has; 0 where each row has codes."""
    if linear.op.weight_of(linear.values) is not None:
        return 0
    return -rows % ALIGNED_ROWS if value(linear.node).dtype.itemsize == 2 else 0


def packed_input(graph: Graph, parts: list[Node], zero_rows: int = 0) -> Node:
    """A new input: the parameters behind each other, as rows of the first, and so many rows of
    zeros.
    """
    inputs = graph.find_nodes(op="placeholder")
    number = sum(record_of(node).packed is not None for node in inputs)
    record = NodeRecord(packed=PackedInput(tuple(part.name for part in parts), zero_rows))
    first = value(parts[0])
    rows = sum(value(part).numel() for part in parts) // math.prod(first.shape[1:])
    size = (rows + zero_rows, *first.shape[1:])
    # A new fake tensor: inputs that share one count as one input.
    return add_input(graph, f"packed_{number}", record, partial(first.new_empty, size))
