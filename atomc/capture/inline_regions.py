"""Regions of a graph, which Dynamo traced once for many layers, put in the place of each call.

    y = invoke_subgraph(region, x, weights of layer 3)    =>    the region's nodes, reading x and the weights of layer 3

Between Dynamo's graph and the functional one calls that follow each other are one opaque op, and inputs that only they
read are left out: AOTAutograd sees each region once, by itself, and what is around them without the layers' weights. Copies
know the layer they stand for: their module path is the call's, not that of the layer that was traced.
"""

import itertools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from atomc.graph.provenance import clean_path
from atomc.graph.sizes import known_equal
from atomc.torch_compat.names import FakeTensor, FakeTensorMode, outside_of_tracing
from atomc.torch_compat.tracing import INVOKE_SUBGRAPH, fake_mode_of

Stack = Mapping[str, Any]

_LIBRARY = torch.library.Library("atom", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(  # type: ignore[no-untyped-call]
    "regions(int number, Tensor[] tensors, SymInt[] sizes) -> Tensor[]", tags=(torch.Tag.pt2_compliant_tag,))
_REGIONS = torch.ops.atom.regions.default
_numbers = itertools.count()
_outputs: dict[int, list[Tensor]] = {}  # of the calls being traced


def _like_traced(number: int, tensors: list[Tensor], sizes: list[int]) -> list[Tensor]:
    return [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) for x in _outputs[number]]


torch.library.register_fake("atom::regions", _like_traced, lib=_LIBRARY)


class CannotStamp(Exception):
    """Regions whose calls are not all alike; the message says why."""


def regions_of(gm: GraphModule) -> dict[str, list[Node]]:
    """The calls of each region in Dynamo's graph, in order, by the region's name."""
    calls: dict[str, list[Node]] = {}
    for node in gm.graph.find_nodes(op="call_function", target=INVOKE_SUBGRAPH):
        calls.setdefault(str(_source(node).target), []).append(node)
    return calls


def _source(call: Node) -> Node:
    """What names the region of a call."""
    source = call.args[0]
    assert isinstance(source, Node)
    return source


def region(gm: GraphModule, name: str) -> GraphModule:
    """The region of that name."""
    found = gm.get_submodule(name)
    assert isinstance(found, GraphModule)
    return found


class Call(NamedTuple):
    """A call of a region. results: the nodes that read its outputs, and the number of the output. stack: see `stack_of`."""

    region: str
    operands: tuple[Any, ...]
    results: list[tuple[Node, int]]
    stack: Stack


@dataclass
class Run:
    """Calls that follow each other. operands: what they read of others, sizes last; outputs: results that others read."""

    calls: list[Call]
    operands: list[Node]
    outputs: list[Node]


class Regions:
    """The regions of one graph of Dynamo's, on their way to a functional graph.

    with Regions(gm, functional) as regions:      functional(body, inputs) -> the functional graph of one region
        ...                                       gm is traced; its calls are opaque ops, its inputs those of `kept`
        regions.stamp(traced)                     all inputs are there again, and nodes in the place of the calls

    kept  the numbers of the inputs that gm has left
    """

    def __init__(self, gm: GraphModule, functional: Callable[[GraphModule, Sequence[Any]], GraphModule]):
        self.gm, self.functional = gm, functional
        self.inputs: list[Node] = list(gm.graph.find_nodes(op="placeholder"))
        self.bodies: dict[str, GraphModule] = {}
        self.traced: dict[str, Stack] = {}
        self.runs: dict[int, Run] = {}
        self.kept = [i for i, node in enumerate(self.inputs) if not _is_apart(node)]

    def __enter__(self) -> "Regions":
        for name, calls in regions_of(self.gm).items():
            body = region(self.gm, name)
            inline(body)
            inputs = [node.meta["example_value"] for node in body.graph.find_nodes(op="placeholder")]
            num_outputs = len(_returned(body))
            self.bodies[name], self.traced[name] = self.functional(body, inputs), stack_of(calls[0])
            _check(self.bodies[name], len(inputs), num_outputs)
        apart = set(self.inputs) - {self.inputs[i] for i in self.kept}
        for calls in list(_following(self.gm.graph)):
            number = next(_numbers)
            self.runs[number] = run = _run(calls, apart)
            made = {reader: _returned(self.bodies[call.region])[i] for call in run.calls for reader, i in call.results}
            _outputs[number] = [_value(made[output]) for output in run.outputs]
            _make_opaque(self.gm.graph, calls, run, number)
        for node in apart:
            self.gm.graph.erase_node(node)
        for name in self.bodies:
            delattr(self.gm, name)
        self.gm.graph.lint()
        self.gm.recompile()
        return self

    def __exit__(self, *_: object) -> None:
        for number in self.runs:
            _outputs.pop(number, None)

    def stamp(self, gm: GraphModule) -> int:
        """Replace every opaque op by the functional nodes; how many calls there were. Copies share their values (`val`)."""
        if _writes(gm.graph):
            raise CannotStamp("the graph writes in place")  # shared values know nothing of aliases in another layer
        graph, inputs = self._with_all_inputs(gm.graph)
        for name, body in self.bodies.items():
            _hoist(gm, body, name)
        for node in [node for node in graph.nodes if node.target is _REGIONS]:
            self._expand(graph, node, inputs)
        gm.graph = graph
        graph.lint()
        return sum(len(run.calls) for run in self.runs.values())

    def _with_all_inputs(self, graph: Graph) -> tuple[Graph, dict[Node, Node]]:
        """A copy of the functional graph; and its inputs, by those of Dynamo's graph."""
        whole = Graph()
        kept = dict(zip(self.kept, graph.find_nodes(op="placeholder"), strict=True))
        inputs = {node: whole.placeholder(f"arg{i}_1") for i, node in enumerate(self.inputs)}
        copies = {kept[i]: inputs[self.inputs[i]] for i in self.kept}
        for node, made in copies.items():
            made.meta = node.meta
        mode = fake_mode_of(graph)
        with outside_of_tracing():
            for i in set(range(len(self.inputs))) - set(self.kept):
                inputs[self.inputs[i]].meta["val"] = _fake_like(_value(self.inputs[i]), mode)
        for node in graph.nodes:
            if node not in copies:
                copies[node] = whole.node_copy(node, copies.__getitem__)
        return whole, inputs

    def _expand(self, graph: Graph, node: Node, inputs: dict[Node, Node]) -> None:
        number, tensors, sizes = node.args
        assert isinstance(number, int) and isinstance(tensors, list | tuple) and isinstance(sizes, list | tuple)
        run = self.runs[number]
        known: dict[Any, Any] = {**inputs, **dict(zip(run.operands, (*tensors, *sizes), strict=True))}
        for call in run.calls:
            body = self.bodies[call.region]
            operands = [known[x] if isinstance(x, Node) else x for x in call.operands]
            _check_operands(body, operands, call)
            made = _copied(graph, body, node, operands, self.traced[call.region], call.stack)
            known.update((reader, made[i]) for reader, i in call.results)
        for reader in list(node.users):
            reader.replace_all_uses_with(known[run.outputs[_index(reader)]])
            graph.erase_node(reader)
        graph.erase_node(node)


def _is_apart(node: Node) -> bool:
    """Whether AOTAutograd need not see this input: only regions read it, and it tells no size."""
    value = _value(node)
    static = type(value) is FakeTensor and all(type(size) is int for size in (*value.shape, *value.stride()))
    return static and all(user.target is INVOKE_SUBGRAPH for user in node.users)


def _fake_like(x: Tensor, mode: FakeTensorMode | None) -> FakeTensor:
    meta = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
    return FakeTensor(mode, meta, x.device)


def _following(graph: Graph) -> Iterator[list[Node]]:
    """Calls that follow each other, with nothing between them but what reads their results."""
    calls: list[Node] = []
    for node in graph.nodes:
        if node.target is INVOKE_SUBGRAPH:
            calls.append(node)
        elif calls and node.op != "get_attr" and not (node.target is operator.getitem and node.args[0] in calls):
            yield calls
            calls = []


def _run(calls: list[Node], apart: set[Node]) -> Run:
    named = [Call(str(_source(call).target), call.args[2:], [(reader, _index(reader)) for reader in call.users],
                  stack_of(call)) for call in calls]  # fmt: skip
    results = [reader for call in named for reader, _ in call.results]
    inside = {*calls, *results}
    read = dict.fromkeys(x for call in named for x in call.operands if isinstance(x, Node) and x not in inside)
    operands = [x for x in read if x not in apart]
    operands.sort(key=lambda x: not isinstance(_value(x), Tensor))  # sizes last
    return Run(named, operands, [reader for reader in results if not inside.issuperset(reader.users)])


def _make_opaque(graph: Graph, calls: list[Node], run: Run, number: int) -> None:
    num_tensors = sum(isinstance(_value(x), Tensor) for x in run.operands)
    with graph.inserting_after(calls[-1]):
        opaque = graph.call_function(_REGIONS, (number, run.operands[:num_tensors], run.operands[num_tensors:]))
    before = opaque
    for i, result in enumerate(run.outputs):
        with graph.inserting_after(before):
            before = graph.call_function(operator.getitem, (opaque, i))
        before.meta.update(result.meta)
        result.replace_all_uses_with(before)
    sources = {_source(call) for call in calls}
    for call in reversed(calls):
        for reader in list(call.users):
            graph.erase_node(reader)
        graph.erase_node(call)
    for source in sources:
        if not source.users:
            graph.erase_node(source)


def _index(reader: Node) -> int:
    """Which output of a call a node reads."""
    number = reader.args[1]
    assert reader.target is operator.getitem and isinstance(number, int)
    return number


def inline(gm: GraphModule) -> None:
    """Replace every call of a region by copies of the region's nodes, in place."""
    names = regions_of(gm)
    for name, calls in names.items():
        body = region(gm, name)
        inline(body)
        _hoist(gm, body, name)
        sources = {_source(call) for call in calls}
        traced = stack_of(calls[0])
        for call in calls:
            made = _copied(gm.graph, body, call, call.args[2:], traced, stack_of(call))
            for reader in list(call.users):
                reader.replace_all_uses_with(made[_index(reader)])
                gm.graph.erase_node(reader)
            gm.graph.erase_node(call)
        for source in sources:
            gm.graph.erase_node(source)
        delattr(gm, name)
    if names:
        gm.graph.lint()
        gm.recompile()


def stack_of(call: Node) -> Stack:
    """The modules around a call of a region, the layer itself innermost."""
    return call.meta.get("nn_module_stack") or {}


def renamed(path: str, traced: Stack, actual: Stack) -> str:
    """A module path of the traced layer, as `clean_path` gives it, as that of another layer."""
    old, new = clean_path(_innermost(traced)), clean_path(_innermost(actual))
    return new + path[len(old):] if path == old or path.startswith(old + ".") else path


def _innermost(stack: Stack) -> str:
    return str(list(stack.values())[-1][0]) if stack else ""


def _writes(graph: Graph) -> bool:
    for node in graph.nodes:
        if node.op == "call_function":
            schema = getattr(node.target, "_schema", None)
            functionalized = getattr(node.target, "__name__", "").startswith("auto_functionalized")
            if functionalized or (schema is not None and schema.is_mutable):
                return True
    return False


def _returned(body: GraphModule) -> Sequence[Any]:
    outputs = body.graph.output_node().args[0]
    assert isinstance(outputs, tuple | list)
    return outputs


def _check(body: GraphModule, num_inputs: int, num_outputs: int) -> None:
    if (len(body.graph.find_nodes(op="placeholder")), len(_returned(body))) != (num_inputs, num_outputs):
        raise CannotStamp("a region changes its signature")
    if _writes(body.graph):
        raise CannotStamp("a region writes in place")
    if not all(isinstance(_value(output), Tensor) for output in _returned(body)):
        raise CannotStamp("a region returns something that is no tensor")


def _check_operands(body: GraphModule, operands: Sequence[Any], call: Call) -> None:
    for placeholder, operand in zip(body.graph.find_nodes(op="placeholder"), operands, strict=True):
        if isinstance(_value(placeholder), Tensor) and not _alike(_value(placeholder), _value(operand)):
            raise CannotStamp(f"{clean_path(_innermost(call.stack))} reads {operand} in another shape, dtype or layout "
                              "than the traced layer")  # fmt: skip


def _value(operand: object) -> Any:
    return operand.meta.get("val", operand.meta.get("example_value")) if isinstance(operand, Node) else operand


def _alike(a: Tensor, b: Tensor) -> bool:
    same = a.dtype == b.dtype and a.device == b.device and a.dim() == b.dim()
    return same and all(map(known_equal, (*a.shape, *a.stride()), (*b.shape, *b.stride())))


def _hoist(gm: GraphModule, body: GraphModule, name: str) -> None:
    """Modules and constants of the region become the graph's, under names that are free there."""
    moved = {str(node.target): f"{name}_{node.target}" for node in body.graph.find_nodes(op="get_attr")}
    for node in body.graph.find_nodes(op="get_attr"):
        node.target = moved[str(node.target)]
    for old, new in moved.items():
        setattr(gm, new, getattr(body, old))


def _copied(
    graph: Graph, body: GraphModule, before: Node, operands: Sequence[Any], traced: Stack, actual: Stack
) -> list[Any]:
    """Copies of a region's nodes before a node of the graph; what the region returns."""
    copies: dict[Node, Any] = dict(zip(body.graph.find_nodes(op="placeholder"), operands, strict=True))
    moved = _mover(_innermost(traced), _innermost(actual))
    with graph.inserting_before(before):
        for node in body.graph.nodes:
            if node.op in ("placeholder", "output"):
                continue
            copies[node] = made = graph.node_copy(node, copies.__getitem__)
            if "nn_module_stack" in node.meta:
                made.meta["nn_module_stack"] = moved(node.meta["nn_module_stack"])
    return [copies[output] if isinstance(output, Node) else output for output in _returned(body)]


def _mover(old: str, new: str) -> Callable[[Stack], Stack]:
    """Rewrites module stacks, of which a layer has few; the nodes of one module keep sharing theirs."""
    done: dict[int, Stack] = {}

    def moved(stack: Stack) -> Stack:
        if id(stack) not in done:
            done[id(stack)] = {key: (new + entry[0][len(old):] if entry[0].startswith(old) else entry[0], *entry[1:])
                               for key, entry in stack.items()}  # fmt: skip
        return done[id(stack)]

    return (lambda stack: stack) if old == new or not old else moved

