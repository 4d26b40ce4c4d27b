"""Compute the shared expert of a mixture as one more of the chosen experts.

    x, ids, weights > moe_experts --------------------------------+
    x > linear, linear > silu_and_mul > linear (> * s) -> shared -+- add
 =>
    x, [ids, E], [weights, 1 or s] > moe_experts of E + 1 experts

s [T, 1] is Qwen2-MoE's sigmoid of a gate. The linears have the scheme of the experts, and quantize
x and the gated activation as these do. The weights are packed, so that nothing is held twice. The
shared expert is summed in fp32 with the others: one rounding less.
"""

import math
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.fx.node import Argument

from atomc.graph.canonical import VIEWS, call, input_name, keeps_last_dim, value
from atomc.graph.edit import insert
from atomc.graph.node_record import record_of, set_record
from atomc.graph.op_call import OpCall, kind_of, op_call, quantizer_of
from atomc.graph.provenance import describe, inherited
from atomc.graph.sizes import known_equal, same_shape
from atomc.ops.activation import GATES
from atomc.ops.op_traits import Kind
from atomc.passes.merge.linears import packed_input
from atomc.rewriting.graph_pass import Change, Context
from atomc.rewriting.matching.near_miss import NearMiss
from atomc.rewriting.matching.pattern import Difference, Unlike
from atomc.rewriting.rewrite import Fired
from atomc.torch_compat.core import Input
from atomc.weights import packed as packed_weights

aten = torch.ops.aten
NAME = "shared_expert"


@dataclass(frozen=True)
class _Mixture:
    """A mixture and its shared expert. column: what multiplies the shared result, [..., 1]."""

    routed: OpCall
    added: Node
    gate: OpCall
    up: OpCall
    down: OpCall
    column: Node | None
    inner: list[Node]  # what is replaced, besides `routed` and `added`

    @property
    def linears(self) -> tuple[OpCall, ...]:
        return self.gate, self.up, self.down


def shared_expert(gm: GraphModule, context: Context) -> Iterator[Change | NearMiss]:
    """Merge each shared expert of the graph with the experts beside it."""
    real = dict(zip(gm.graph.find_nodes(op="placeholder"), context.inputs, strict=False))
    if not real:
        return
    for routed in list(filter(None, map(_experts, gm.graph.nodes))):
        for added, shared in _sums(routed.node):
            miss = partial(_miss, routed.node)
            try:
                mixture = _mixture(routed, added, shared)
                _check(mixture, context)
                parts = dict(_parts(mixture, real))
            except Unlike as unfit:
                yield miss(unfit.difference)
            else:
                yield Change(routed.node, miss, partial(_merge, mixture, parts))


def _experts(node: Node) -> OpCall | None:
    called = op_call(node)
    return called if called is not None and Kind.EXPERTS in called.op.kind else None


def _sums(routed: Node) -> Iterator[tuple[Node, Node]]:
    """Sums that read the result of experts, directly or behind views, with the other operand, which
    a linear computes.
    """
    for reader in list(routed.users):
        operands = call(reader).operands
        if call(reader).op == "add" and len(operands) == 2:
            other = operands[operands.index(routed) - 1]
            if any(
                kind_of(node) is Kind.LINEAR
                for node in (_rows(other), *map(_rows, _factors(other)))
            ):
                yield reader, other
        elif _is_view(reader):
            yield from _sums(reader)


def _is_view(node: Node) -> bool:
    return node.op == "call_function" and call(node).op in VIEWS and keeps_last_dim(node)


def _rows(node: Node) -> Node:
    """The node behind views of the same rows."""
    while _is_view(node):
        node = call(node).operands[0]
    return node


def _factors(node: Node) -> list[Node]:
    behind = _rows(node)
    operands = call(behind).operands if call(behind).op == "mul" else []
    return operands if len(operands) == 2 else []


def _mixture(routed: OpCall, added: Node, shared: Node) -> _Mixture:
    """The parts of a shared expert, each of which is read by the next one only."""
    inner: list[Node] = []

    def back(node: Node) -> Node:
        """The node behind views, which all have no other readers."""
        while True:
            if len(node.users) > 1:
                other = f"{len(node.users)} nodes read it"
                raise Unlike("extra user", f"no other reader of {describe(node)}", other, node)
            inner.append(node)
            if not _is_view(node):
                return node
            [node] = call(node).operands

    for operand in call(added).operands:
        if operand is not shared:
            back(operand)
    if not same_shape(value(added), value(shared)) or call(added).attrs.get("alpha", 1) != 1:
        raise Unlike("size", "a sum of equal shapes", describe(added), added)
    scaled = back(shared)
    column = _column(scaled, shared)
    if column is not None:
        scaled = back(next(node for node in _factors(scaled) if node is not column))
    down = _linear(routed, scaled)
    active = back(_unquantized(routed, down, back))
    _check_activation(routed, active, down)
    gate, up = (_linear(routed, back(node)) for node in call(active).operands)
    for linear in (gate, up):
        _check_input(routed, linear)
    return _Mixture(routed, added, gate, up, down, column, inner)


def _column(scaled: Node, shared: Node) -> Node | None:
    """What multiplies each row of a shared result, [..., 1]; None if it is not a product. shared:
    the result, maybe behind views.
    """
    factors = _factors(scaled)
    if not factors:
        return None
    column = next((node for node in factors if known_equal(value(node).shape[-1], 1)), None)
    if column is None or not same_shape(value(scaled), value(shared)):
        raise Unlike("other op", "a factor per token", describe(scaled), scaled)
    return column


def _check_activation(routed: OpCall, active: Node, down: OpCall) -> None:
    """Raise Unlike if the input of `down` is not activated as in the routed experts."""
    activation = routed.arguments["activation"]
    gate_of, arguments = GATES.get(str(activation), (None, {}))
    gated = op_call(active)
    if gated is None or gated.op.kind is not Kind.GATE:
        raise Unlike("other op", "a gated activation before it", describe(active), down.node)
    if gated.op is not gate_of or not arguments.items() <= gated.arguments.items():
        same = f"{activation}, as the routed experts"
        raise Unlike("guard", same, describe(active), active)


def _check_input(routed: OpCall, linear: OpCall) -> None:
    """Raise Unlike if a linear does not read the rows that the routed experts read."""
    for name in ("x", "x_scale"):
        argument, wanted = linear.arguments.get(name), routed.arguments.get(name)
        if not _same_rows(argument, wanted):
            raise Unlike("same value", f"{name} of the routed experts", str(argument), linear.node)


def _linear(routed: OpCall, node: Node) -> OpCall:
    """The call of a linear that multiplies as the routed experts do, without a bias."""
    assert routed.op.linear is not None
    wanted = routed.op.linear(routed.arguments)
    called = op_call(node)
    if called is None or called.op is not wanted:
        raise Unlike("other op", f"{wanted.name}, as {routed.op.name}", describe(node), node)
    if called.arguments["bias"] is not None:
        raise Unlike("guard", "no bias", f"{called['bias'].name} is added", node)
    for name in sorted(called.arguments.keys() & {"out_dtype", "block", "group"}):
        if called.arguments[name] != routed.arguments[name]:
            same = f"{name}={routed.arguments[name]}, as the routed experts"
            raise Unlike("attribute", same, f"{name}={called.arguments[name]}", node)
    return called


def _unquantized(routed: OpCall, down: OpCall, back: Callable[[Node], Node]) -> Node:
    """The input of `down`, before it is quantized as the op of experts quantizes it."""
    if routed.arguments.get("x_scale") is None:
        return down["x"]
    codes = back(down["x"])
    back(down["x_scale"])
    quantizer, of_routed = quantizer_of(codes), quantizer_of(_rows(routed["x"]))
    if quantizer is None or of_routed is None or not _equal_calls(quantizer, of_routed):
        wanted = (
            describe(of_routed) if of_routed is not None else "a quantizer of the routed experts"
        )
        raise Unlike("other op", wanted, describe(quantizer or codes), down.node)
    return call(quantizer).operands[0]


def _equal_calls(a: Node, b: Node) -> bool:
    """Whether two calls differ at most in their first operand."""
    return (a.target, a.args[1:], a.kwargs) == (b.target, b.args[1:], b.kwargs)


def _same_rows(a: Argument, b: Argument) -> bool:
    """Whether two arguments are the same rows, which both may have been quantized alike."""
    if not isinstance(a, Node) or not isinstance(b, Node):
        return a == b
    a, b = _rows(a), _rows(b)
    part = a.target is operator.getitem or quantizer_of(a) is a
    return a is b or (part and _equal_calls(a, b) and _same_rows(a.args[0], b.args[0]))


def _check(mixture: _Mixture, context: Context) -> None:
    """Raise Unlike if the op of the experts does not compute this."""
    routed, node = mixture.routed, mixture.routed.node
    if context.options.rounding == "hf":
        wanted = "rounding='fp32'"
        raise Unlike("guard", wanted, "rounding='hf', but the sum would round once less", node)
    for name in ("b13", "b2", "act_scale", "limit", "interleaved"):
        if argument := routed.arguments.get(name):
            raise Unlike("attribute", f"routed experts without {name}", f"{name}={argument}", node)
    if routed.arguments.get("weight_on_input") and mixture.column is not None:
        wanted = "weights of results"
        raise Unlike("attribute", wanted, "weight_on_input, which changes x", node)
    width, rows = value(routed["w13"]).shape[1] // 2, value(mixture.gate["weight"]).shape[0]
    if rows != width:
        why = "; a wider one would be several experts, and its weights be copied" * (
            rows % width == 0
        )
        raise Unlike(
            "size", f"{width} columns, as routed experts", f"{rows}{why}", mixture.gate.node
        )
    assert mixture.gate.op.concat is not None
    unjoined = mixture.gate.op.concat([linear.values for linear in (mixture.gate, mixture.up)])
    if isinstance(unjoined, str):
        raise Unlike("guard", "rows of gate over rows of up", unjoined, mixture.gate.node)


def _parts(mixture: _Mixture, real: Mapping[Node, Input]) -> Iterator[tuple[str, list[Node]]]:
    """The inputs to pack, for each argument of the op of experts that stores weights: [E, ...], and
    what becomes its last row.
    """
    of_linear = _stored(mixture.gate, "weight")
    for i, name in enumerate(_stored(mixture.routed, "w13", "w2")):
        linears = (mixture.down,) if i % 2 else (mixture.gate, mixture.up)  # of w2, of w13
        arguments = [mixture.routed.arguments[name]]
        arguments += [linear.arguments[of_linear[i // 2]] for linear in linears]
        if arguments[0] is None and arguments[1] is None:
            continue
        parts = [node for node in dict.fromkeys(arguments) if isinstance(node, Node)]
        if reason := _unpackable(parts, mixture, real) or _unlike(parts):
            wanted = f"weights that become one more row of {name}"
            raise Unlike("guard", wanted, reason, linears[0].node)
        yield name, parts


def _stored(called: OpCall, *unquantized: str) -> tuple[str, ...]:
    """The arguments that store its weights: the weights, then their scales, then their zero
    points.
    """
    weight = called.op.weight_of(called.arguments)
    return unquantized if weight is None else weight.stored


def _unpackable(parts: list[Node], mixture: _Mixture, real: Mapping[Node, Input]) -> str | None:
    """Why these inputs cannot be packed, or None."""
    readers = {mixture.routed.node, *(linear.node for linear in mixture.linears)}
    parameters = []
    for part in parts:
        parameter = real.get(part)
        if part.op != "placeholder" or parameter is None:
            return f"{part.name} is computed in the graph"
        if not readers.issuperset(part.users):
            return f"{input_name(part)} has other readers"
        if reason := packed_weights.unpackable(parameter):
            return f"{input_name(part)}: {reason}"
        assert isinstance(parameter, nn.Parameter)
        parameters.append(parameter)
    return packed_weights.packed_with_others(parameters)


def _unlike(parts: list[Node]) -> str | None:
    """Why the values of all but the first part are no row of the first, or None."""
    first, *others = map(value, parts)
    row = first.shape[1:]
    fits = math.prod(row) == sum(part.numel() for part in others) and all(
        part.shape[1:] == row[-part.dim() + 1 :] if part.dim() > 1 else len(others) == 1
        for part in others
    )
    alike = all((part.dtype, part.device) == (first.dtype, first.device) for part in others)
    return None if others and fits and alike else ", ".join(map(_spell_value, (first, *others)))


def _spell_value(fake: Tensor) -> str:
    return f"{str(fake.dtype).removeprefix('torch.')}{list(fake.shape)}"


def _merge(mixture: _Mixture, parts: Mapping[str, list[Node]]) -> Fired:
    routed, added = mixture.routed, mixture.added
    graph, experts = added.graph, len(value(routed["w2"]))
    replaced = [routed.node, added, *mixture.inner]
    packed = {name: packed_input(graph, nodes) for name, nodes in parts.items()}
    ids = insert(added, aten.constant_pad_nd.default, routed["ids"], [0, 1], experts)
    weights = _weights(mixture)
    bound = routed.bound(**packed, ids=ids, weights=weights)
    merged = insert(added, routed.op.overload, *bound.args, **bound.kwargs)
    merged.meta.update(inherited(replaced, routed.node, NAME))
    set_record(merged, replace(record_of(merged), shared_experts=1))
    [operand] = [node for node in call(added).operands if node in mixture.inner[:1]]
    routed.node.replace_all_uses_with(merged)
    added.replace_all_uses_with(merged if operand is routed.node else operand)
    graph.erase_node(added)
    return Fired(NAME, routed.node, {"experts": experts}, set(replaced), [merged])


def _weights(mixture: _Mixture) -> Node:
    """The router's weights [T, k], and the factor of the shared expert."""
    added, weights, column = mixture.added, mixture.routed["weights"], mixture.column
    if column is None:
        return insert(added, aten.constant_pad_nd.default, weights, [0, 1], 1.0)
    if value(column).dim() != 2:
        column = insert(added, aten.view.default, column, [-1, 1])
    if value(column).dtype != value(weights).dtype:
        column = insert(added, aten._to_copy.default, column, dtype=value(weights).dtype)
    return insert(added, aten.cat.default, [weights, column], -1)


def _miss(routed: Node, difference: Difference) -> NearMiss:
    assert difference.node is not None
    nodes = {routed, difference.node}
    return NearMiss(NAME, "", difference.node, 1, 2, 0, [difference], nodes)
