"""Fuse the convolution, the gates and the delta rule of a gated delta net, on the states of the
runtime.

x > causal_conv1d_update > split -+-> q -+
                                  +-> k -+
                                  +-> v -+- gated_delta_rule_update
a, b > delta_gates -+-> g ---------------+
                    +-> beta ------------+
 =>
x, a, b > conv_gated_delta_rule_update

The channels are all queries, then all keys, then all values. A kernel can compute a step of
decoding in one launch; other steps it computes one op after another, so that nothing is lost there.
"""

import operator
from collections.abc import Iterator, Mapping
from functools import partial
from typing import NamedTuple

from torch.fx import GraphModule, Node
from torch.fx.node import Argument

from atomc import ops
from atomc.graph.canonical import VIEWS, call, readers, value
from atomc.graph.edit import insert, replace
from atomc.graph.op_call import arguments_of
from atomc.graph.provenance import inherited
from atomc.graph.sizes import known_equal, same_sizes
from atomc.ops.state_update import STEP
from atomc.rewriting.graph_pass import Change, Context
from atomc.rewriting.matching.near_miss import NearMiss
from atomc.rewriting.matching.pattern import Difference, Unlike
from atomc.rewriting.rewrite import Fired

NAME = "conv_gated_delta_rule"
_RESULTS = {"g": 0, "beta": 1}  # of delta_gates


class _Part(NamedTuple):
    """Queries, keys or values, as columns of a convolution. path: from its result, exclusive, to
    the heads.
    """

    convolution: Node
    path: list[Node]


class _DeltaNet(NamedTuple):
    """A rule with what is fused into it."""

    rule: Node
    convolution: Node
    gates: Node
    between: list[Node]

    def replaced(self) -> list[Node]:
        return [self.convolution, self.gates, *self.between, self.rule]


def conv_gated_delta_rule(gm: GraphModule, context: Context) -> Iterator[Change | NearMiss]:
    """Fuse each gated_delta_rule_update with the convolution and the gates before it."""
    for node in gm.graph.nodes:
        if node.target is ops.gated_delta_rule_update.overload:
            miss = partial(_miss, node)
            try:
                yield Change(node, miss, partial(_fuse, _delta_net(node)))
            except Unlike as unlike:
                yield miss(unlike.difference)


def _miss(node: Node, difference: Difference) -> NearMiss:
    # Of three ops one is not there.
    return NearMiss(NAME, "", node, 2, 3, edits=0, differences=[difference], nodes={node})


def _delta_net(rule: Node) -> _DeltaNet:
    """What is fused. Raises Unlike with the first reason why nothing is."""
    arguments = arguments_of(rule)
    parts: list[_Part] = []
    start = 0
    for name in ("q", "k", "v"):
        parts.append(_columns(_node(arguments[name]), start, name))
        start += _width(_node(arguments[name]))
    convolution = parts[0].convolution
    if any(part.convolution is not convolution for part in parts):
        one = "q, k and v from one convolution"
        raise Unlike("same value", one, "several convolutions", rule)
    between = [node for part in parts for node in part.path]
    between += [_node(arguments[name]) for name in _RESULTS]
    net = _DeltaNet(rule, convolution, _gates(arguments), between)
    _check(net)
    return net


def _columns(heads: Node, start: int, name: str) -> _Part:
    """The convolution whose columns from `start` on these heads are."""
    expected = f"{name}: columns {start} to {start + _width(heads)} of causal_conv1d_update"
    path = [heads]
    while call(path[-1]).op in VIEWS:
        path.append(call(path[-1]).operands[0])
    part = path[-1]
    if call(part).op != "slice":
        raise Unlike("other op", expected, _name(part), part)
    convolution, attrs = call(part).operands[0], call(part).attrs
    if convolution.target is not ops.causal_conv1d_update.overload:
        raise Unlike("other op", expected, _name(convolution), convolution)
    if (attrs["dim"], attrs["start"], attrs["step"]) != (-1, start, 1) or not known_equal(
        value(part).shape[-1], _width(heads)
    ):
        columns = f"{value(part).shape[-1]} columns from {attrs['start']} on"
        raise Unlike("operand order", expected, columns, part)
    if not same_sizes(value(part).shape[:-1], value(heads).shape[:-2]):
        raise Unlike("view", f"{name}: heads of each row", "other rows", heads)
    return _Part(convolution, path)


def _gates(arguments: Mapping[str, Argument]) -> Node:
    """The delta_gates whose results g and beta are."""
    sources = []
    for name, index in _RESULTS.items():
        node = _node(arguments[name])
        source = _node(node.args[0]) if node.target is operator.getitem else node
        if source.target is not ops.delta_gates.overload or node.args[1] != index:
            raise Unlike("other op", f"{name} of delta_gates", _name(source), source)
        sources.append(source)
    if sources[0] is not sources[1]:
        raise Unlike("same value", "g and beta of one delta_gates", "two of them", sources[1])
    return sources[0]


def _check(net: _DeltaNet) -> None:
    """Raise Unlike if these nodes cannot be one op."""
    inside = set(net.replaced())
    for node in (net.convolution, net.gates, *net.between):
        outside = [reader for reader in readers(node) if reader not in inside]
        if outside:
            alone = f"no other reader of {_name(node)}"
            raise Unlike("extra user", alone, f"{_name(outside[0])} reads it too", node)
    rule, convolution = arguments_of(net.rule), arguments_of(net.convolution)
    for name in STEP:
        if rule[name] is not convolution[name]:
            raise Unlike("same value", f"one {name}", "another one", net.convolution)
    state = _node(convolution["conv_state"])
    if len(state.users) > 1:
        alone = "no other reader of the convolution's state"
        raise Unlike("extra user", alone, "another op reads it too", state)
    x, a = value(_node(convolution["x"])), value(_node(arguments_of(net.gates)["a"]))
    if not same_sizes(x.shape[:-1], a.shape[:-1]):
        raise Unlike("size", "gates of the rows of x", "those of other rows", net.gates)


def _fuse(net: _DeltaNet) -> Fired:
    together = net.convolution, net.gates, net.rule
    arguments = {name: x for node in together for name, x in arguments_of(node).items()}
    op = ops.conv_gated_delta_rule_update
    bound = op.signature.bind(**{name: arguments[name] for name in op.signature.parameters})
    fused = insert(net.rule, op.overload, *bound.args, **bound.kwargs)
    consumed = tuple(call(node).op for node in together)
    nodes = net.replaced()
    fused.meta.update(inherited(nodes, net.rule, NAME, consumed))
    replace(net.rule, fused)
    _erase({*nodes} - {net.rule})
    attrs = {name: arguments[name] for name in ("activation", "scale", "rate_scale")}
    return Fired(NAME, net.rule, attrs, {*nodes}, [fused], consumed)


def _erase(nodes: set[Node]) -> None:
    """Erase these nodes, and the splits between them, readers first."""
    splits = {node.args[0] for node in nodes if node.target is operator.getitem}
    every = nodes | {node for node in splits if isinstance(node, Node)}
    for node in sorted(every, reverse=True):
        node.graph.erase_node(node)


def _name(node: Node) -> str:
    return call(node).op.removeprefix("atom::")


def _width(heads: Node) -> int:
    """Columns of all heads."""
    count, width = value(heads).shape[-2:]
    return int(count) * int(width)


def _node(argument: Argument) -> Node:
    assert isinstance(argument, Node)
    return argument
