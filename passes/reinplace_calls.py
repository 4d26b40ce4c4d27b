"""Call ops that write to their operands directly, where AOTAutograd calls them on a copy.

    r = auto_functionalized_v2(op, ..., _all_bases=[P]);  v = r[1];  ... v ...;  copy_(P, v)
 =>
    r = op(..., P);  ... P ...

P is a graph input, and the op may write to it, or to views of it. Several calls may write to one
input, each to the result of the one before. Allowed if what a call writes to is read by no later
node, and by the call only as what it writes to. A call with several bases changes only if this
holds for each of them.
"""

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node
from torch.fx.node import Argument, map_arg

from atomc.graph.canonical import value
from atomc.graph.mutation import storage
from atomc.rewriting.rewrite import Fired

aten = torch.ops.aten
CALL = torch.ops.higher_order.auto_functionalized_v2


@dataclass(frozen=True)
class _Chain:
    """The calls that write to one input, in order, and the copy of the last result into it."""

    target: Node
    calls: tuple[Node, ...]
    results: tuple[Node, ...]  # of each call, the new value of the input
    copy: Node


def reinplace_calls(graph: Graph) -> list[Fired]:
    """Replace the calls; one site for each input that they write to."""
    chains = _independent(list(_chains(graph)))
    targets = {result: chain.target for chain in chains for result in chain.results}
    fired = []
    for chain in chains:
        graph.erase_node(chain.copy)
    for call in dict.fromkeys(call for chain in chains for call in chain.calls):
        bases = [targets.get(base, base) for base in _bases(call)]
        direct = _call_directly(graph, call, bases)
        fired += [Fired("reinplace", direct, {"input": base.name}) for base in bases]
    return fired


def _independent(chains: Sequence[_Chain]) -> Sequence[_Chain]:
    """The chains whose calls write to nothing but the inputs of these chains."""
    while True:
        written = {result for chain in chains for result in chain.results}
        closed = [
            chain
            for chain in chains
            if all(
                len(_bases(call)) == sum(reader in written for reader in call.users)
                for call in chain.calls
            )
        ]
        if len(closed) == len(chains):
            return chains
        chains = closed


def _chains(graph: Graph) -> Iterator[_Chain]:
    position = {node: i for i, node in enumerate(graph.nodes)}
    readers = _readers(graph)
    for copy in graph.find_nodes(op="call_function", target=aten.copy_.default):
        chain = _chain(copy)
        if chain is not None and _reads_in_order(chain, position, readers):
            yield chain


def _chain(copy: Node) -> _Chain | None:
    """The calls whose last result is copied into a graph input; None if another value is."""
    target, new = copy.args
    if not isinstance(target, Node) or target.op != "placeholder" or copy.users:
        return None
    results: list[Node] = []
    while isinstance(new, Node) and new is not target and _writes_directly(new):
        results.insert(0, new)
        new = _written_to(new)
    if new is not target or not results:
        return None
    return _Chain(target, tuple(map(_call_of, results)), tuple(results), copy)


def _reads_in_order(
    chain: _Chain, position: Mapping[Node, int], readers: Mapping[Node, set[Node]]
) -> bool:
    """Whether each value is read before the call that overwrites it, and the last one until the
    end, but not by the output.
    """
    overwritten = zip([chain.target, *chain.results[:-1]], chain.calls, strict=True)
    return all(
        all(position[reader] <= position[call] for reader in readers[old] - {chain.copy})
        and _is_only_base(old, call)
        for old, call in overwritten
    ) and not any(reader.op == "output" for reader in readers[chain.results[-1]])


def _readers(graph: Graph) -> dict[Node, set[Node]]:
    """The nodes that read each node or a view of it."""
    readers: dict[Node, set[Node]] = {node: set() for node in graph.nodes}
    for node in graph.nodes:
        for operand in node.all_input_nodes:
            readers[operand].add(node)
            readers[storage(operand)].add(node)
    return readers


def _writes_directly(result: Node) -> bool:
    """Whether the node is the new value of a base of a call that could be made without a copy."""
    if result.target is not operator.getitem:
        return False
    call = _call_of(result)
    return (
        call.target is CALL
        and isinstance(call.args[0], torch._ops.OpOverload)
        and len(call.args) == 1
        and _number(result) >= _num_outputs(call)
        and not any(key.endswith("_length") and key.startswith("_") for key in call.kwargs)
    )


def _is_only_base(old: Node, call: Node) -> bool:
    """Whether the call reads this value only as one of its bases, and once."""
    other = {key: argument for key, argument in call.kwargs.items() if key != "_all_bases"}
    operands: list[Node] = []
    map_arg(other, operands.append)
    return _bases(call).count(old) == 1 and all(storage(node) is not old for node in operands)


def _call_of(result: Node) -> Node:
    call = result.args[0]
    assert isinstance(call, Node)
    return call


def _number(result: Node) -> int:
    number = result.args[1]
    assert isinstance(number, int)
    return number


def _bases(call: Node) -> list[Node]:
    bases = call.kwargs["_all_bases"]
    assert isinstance(bases, Sequence)
    return [base for base in bases if isinstance(base, Node)]


def _num_outputs(call: Node) -> int:
    """The number of results before the new bases: at least one, None for an op without a result."""
    return max(len(_op_of(call)._schema.returns), 1)


def _op_of(call: Node) -> torch._ops.OpOverload:
    op = call.args[0]
    assert isinstance(op, torch._ops.OpOverload)
    return op


def _written_to(result: Node) -> Node:
    """The base of which the node is the new value."""
    call = _call_of(result)
    return _bases(call)[_number(result) - _num_outputs(call)]


def _call_directly(graph: Graph, call: Node, bases: Sequence[Node]) -> Node:
    """Replace the call by one of its op on the bases themselves."""
    op, num_outputs = _op_of(call), _num_outputs(call)
    with graph.inserting_before(call):
        arguments = {
            argument.name: (
                _view(graph, call, f"_{argument.name}", bases)
                if argument.alias_info is not None and argument.alias_info.is_write
                else call.kwargs[argument.name]
            )
            for argument in op._schema.arguments
        }
        direct = graph.call_function(op, (), arguments)
    results = call.meta["val"][:num_outputs]
    single = len(op._schema.returns) < 2
    direct.meta.update(call.meta, val=results[0] if single else tuple(results))
    for reader in list(call.users):
        number = _number(reader)
        if number >= num_outputs:
            reader.replace_all_uses_with(bases[number - num_outputs])
        elif single:
            reader.replace_all_uses_with(direct)
        else:
            reader.args = (direct, number)
            continue
        graph.erase_node(reader)
    graph.erase_node(call)
    return direct


def _view(graph: Graph, call: Node, prefix: str, bases: Sequence[Node]) -> Node | None:
    """The operand that the call describes by the fields with this prefix: a base or a view."""
    fields: Mapping[str, Argument] = call.kwargs
    number = fields[f"{prefix}_base_index"]
    if number is None:
        return None
    assert isinstance(number, int)
    base = bases[number]
    if f"{prefix}_size" in fields:
        names, op = ("size", "stride", "storage_offset"), aten.as_strided.default
    elif f"{prefix}_slice_dim" in fields:
        names, op = ("slice_dim", "slice_start", "slice_end"), aten.slice.Tensor
    else:
        return base
    where = tuple(fields[f"{prefix}_{name}"] for name in names)
    view = graph.call_function(op, (base, *where))
    view.meta.update(call.meta, val=op(value(base), *map_arg(where, lambda node: node.meta["val"])))
    return view
