"""Inlines regions, which Dynamo traced once for several layers, at each of their calls.

    y = invoke_subgraph(region, x, weights of layer 3)
    =>  the nodes of the region, which read x and the weights of layer 3

While AOTAutograd traces the graph, consecutive calls are replaced by one opaque op, and inputs that
only they read are removed: AOTAutograd traces each region once, separately, and the rest of the
graph without the weights of layers. Inlined nodes have the module path of their call, not that of
the layer that was traced.
"""

import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import Argument, map_arg

from atomc.graph.canonical import Value
from atomc.graph.provenance import Stack, clean_path
from atomc.graph.sizes import known_equal
from atomc.torch_compat.core import FakeTensor, FakeTensorMode, Input, outside_of_tracing
from atomc.torch_compat.tracing import INVOKE_SUBGRAPH, fake_mode_of

_LIBRARY = torch.library.Library("atom", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(  # type: ignore[no-untyped-call]
    "regions(int number, Tensor[] tensors, SymInt[] sizes) -> Tensor[]",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_REGIONS = torch.ops.atom.regions.default
_numbers = itertools.count()
_outputs: dict[int, list[Tensor]] = {}  # of the calls that are being traced, by number


def _fake_outputs(number: int, tensors: list[Tensor], sizes: list[int]) -> list[Tensor]:
    return [
        torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
        for x in _outputs[number]
    ]


torch.library.register_fake("atom::regions", _fake_outputs, lib=_LIBRARY)


class CannotInline(Exception):
    """A region cannot be traced once for all of its calls; the message says why."""


def regions_of(gm: GraphModule) -> dict[str, list[Node]]:
    """Name of a region -> its calls in Dynamo's graph, in order."""
    calls: dict[str, list[Node]] = {}
    for node in gm.graph.find_nodes(op="call_function", target=INVOKE_SUBGRAPH):
        calls.setdefault(str(_source(node).target), []).append(node)
    return calls


def _source(call: Node) -> Node:
    """The get_attr node of the region that is called."""
    source = call.args[0]
    assert isinstance(source, Node)
    return source


def region(gm: GraphModule, name: str) -> GraphModule:
    """The region of that name."""
    body = gm.get_submodule(name)
    assert isinstance(body, GraphModule)
    return body


class RegionCall(NamedTuple):
    """A call of a region. results: (getitem node, number of the output) for each output that is
    read. stack: see `stack_of`.
    """

    region: str
    operands: tuple[Argument, ...]
    results: list[tuple[Node, int]]
    stack: Stack


@dataclass
class ConsecutiveCalls:
    """Consecutive calls. operands: nodes that they read, sizes last; outputs: their results that
    other nodes read.
    """

    calls: list[RegionCall]
    operands: list[Node]
    outputs: list[Node]


class TracedRegions:
    """The regions of one graph from Dynamo, while it is converted to a functional graph.

    with TracedRegions(gm, functional) as regions:
        traced = ...                  # trace gm, whose calls are now opaque ops
        regions.inline_calls(traced)  # replace these by nodes, and restore all inputs

    functional  (region, its inputs) -> its functional graph
    kept        the numbers of the inputs that remain in gm
    """

    def __init__(
        self, gm: GraphModule, functional: Callable[[GraphModule, Sequence[Input]], GraphModule]
    ):
        self.gm, self.functional = gm, functional
        self.inputs: list[Node] = list(gm.graph.find_nodes(op="placeholder"))
        self.bodies: dict[str, GraphModule] = {}
        self.traced: dict[str, Stack] = {}
        self.runs: dict[int, ConsecutiveCalls] = {}
        self.kept = [i for i, node in enumerate(self.inputs) if not _only_regions_read(node)]

    def __enter__(self) -> "TracedRegions":
        for name, calls in regions_of(self.gm).items():
            body = region(self.gm, name)
            inline(body)
            inputs = [
                node.meta["example_value"] for node in body.graph.find_nodes(op="placeholder")
            ]
            num_outputs = len(_returned(body))
            self.bodies[name], self.traced[name] = self.functional(body, inputs), stack_of(calls[0])
            _check_region(self.bodies[name], len(inputs), num_outputs)
        withheld = set(self.inputs) - {self.inputs[i] for i in self.kept}
        for calls in list(_call_runs(self.gm.graph)):
            number = next(_numbers)
            self.runs[number] = run = _consecutive_calls(calls, withheld)
            made = {
                reader: _returned(self.bodies[call.region])[i]
                for call in run.calls
                for reader, i in call.results
            }
            _outputs[number] = [_tensor(made[output]) for output in run.outputs]
            _make_opaque(self.gm.graph, calls, run, number)
        for node in withheld:
            self.gm.graph.erase_node(node)
        for name in self.bodies:
            delattr(self.gm, name)
        self.gm.graph.lint()
        self.gm.recompile()
        return self

    def __exit__(self, *_: object) -> None:
        for number in self.runs:
            _outputs.pop(number, None)

    def inline_calls(self, gm: GraphModule) -> int:
        """Replace each opaque op by functional nodes, which share fake tensors (`val`). Returns the
        number of calls.
        """
        if _writes(gm.graph):
            raise CannotInline(
                "the graph writes in place"
            )  # shared fake tensors do not show aliases of another layer
        graph, inputs = self._copy_with_all_inputs(gm.graph)
        for name, body in self.bodies.items():
            _move_attributes(gm, body, name)
        for node in [node for node in graph.nodes if node.target is _REGIONS]:
            self._expand(graph, node, inputs)
        gm.graph = graph
        graph.lint()
        return sum(len(run.calls) for run in self.runs.values())

    def _copy_with_all_inputs(self, graph: Graph) -> tuple[Graph, dict[Node, Node]]:
        """(a copy of the functional graph with all inputs, input of Dynamo's graph -> its
        input).
        """
        copy = Graph()
        inputs_by_number = dict(zip(self.kept, graph.find_nodes(op="placeholder"), strict=True))
        inputs = {node: copy.placeholder(f"arg{i}_1") for i, node in enumerate(self.inputs)}
        copies = {inputs_by_number[i]: inputs[self.inputs[i]] for i in self.kept}
        for node, new_input in copies.items():
            new_input.meta = node.meta
        mode = fake_mode_of(graph)
        with outside_of_tracing():
            for i in set(range(len(self.inputs))) - set(self.kept):
                inputs[self.inputs[i]].meta["val"] = _fake_like(_tensor(self.inputs[i]), mode)
        for node in graph.nodes:
            if node not in copies:
                copies[node] = copy.node_copy(node, copies.__getitem__)
        return copy, inputs

    def _expand(self, graph: Graph, node: Node, inputs: dict[Node, Node]) -> None:
        number, tensors, sizes = node.args
        assert (
            isinstance(number, int)
            and isinstance(tensors, list | tuple)
            and isinstance(sizes, list | tuple)
        )
        run = self.runs[number]
        values: dict[Node, Argument] = {
            **inputs,
            **dict(zip(run.operands, (*tensors, *sizes), strict=True)),
        }
        for call in run.calls:
            body = self.bodies[call.region]
            operands = [values[x] if isinstance(x, Node) else x for x in call.operands]
            _check_operands(body, operands, call)
            outputs = _copy_body(graph, body, node, operands, self.traced[call.region], call.stack)
            values.update((reader, outputs[i]) for reader, i in call.results)
        for reader in list(node.users):
            replace_uses(reader, values[run.outputs[_output_index(reader)]])
            graph.erase_node(reader)
        graph.erase_node(node)


def _only_regions_read(node: Node) -> bool:
    """Whether only regions read this input, and it has no dynamic size, so that AOTAutograd does
    not need it.
    """
    value = _value(node)
    static = type(value) is FakeTensor and all(
        type(size) is int for size in (*value.shape, *value.stride())
    )
    return static and all(user.target is INVOKE_SUBGRAPH for user in node.users)


def _fake_like(x: Tensor, mode: FakeTensorMode | None) -> FakeTensor:
    meta = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
    return FakeTensor(mode, meta, x.device)


def _call_runs(graph: Graph) -> Iterator[list[Node]]:
    """Lists of consecutive calls: between them are only getitem nodes of their results."""
    calls: list[Node] = []
    for node in graph.nodes:
        if node.target is INVOKE_SUBGRAPH:
            calls.append(node)
        elif (
            calls
            and node.op != "get_attr"
            and not (node.target is operator.getitem and node.args[0] in calls)
        ):
            yield calls
            calls = []


def _consecutive_calls(calls: list[Node], withheld: set[Node]) -> ConsecutiveCalls:
    named = [
        RegionCall(
            str(_source(call).target),
            call.args[2:],
            [(reader, _output_index(reader)) for reader in call.users],
            stack_of(call),
        )
        for call in calls
    ]
    results = [reader for call in named for reader, _ in call.results]
    inside = {*calls, *results}
    read = dict.fromkeys(
        x for call in named for x in call.operands if isinstance(x, Node) and x not in inside
    )
    operands = [x for x in read if x not in withheld]
    operands.sort(key=lambda x: not isinstance(_value(x), Tensor))  # sizes last
    return ConsecutiveCalls(
        named, operands, [reader for reader in results if not inside.issuperset(reader.users)]
    )


def _make_opaque(graph: Graph, calls: list[Node], run: ConsecutiveCalls, number: int) -> None:
    num_tensors = sum(isinstance(_value(x), Tensor) for x in run.operands)
    with graph.inserting_after(calls[-1]):
        opaque = graph.call_function(
            _REGIONS, (number, run.operands[:num_tensors], run.operands[num_tensors:])
        )
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


def _output_index(reader: Node) -> int:
    """The number of the output that a getitem node reads."""
    number = reader.args[1]
    assert reader.target is operator.getitem and isinstance(number, int)
    return number


def inline(gm: GraphModule) -> None:
    """Replace each call of a region by copies of the region's nodes, in place."""
    names = regions_of(gm)
    for name, calls in names.items():
        body = region(gm, name)
        inline(body)
        _move_attributes(gm, body, name)
        sources = {_source(call) for call in calls}
        traced = stack_of(calls[0])
        for call in calls:
            outputs = _copy_body(gm.graph, body, call, call.args[2:], traced, stack_of(call))
            for reader in list(call.users):
                replace_uses(reader, outputs[_output_index(reader)])
                gm.graph.erase_node(reader)
            gm.graph.erase_node(call)
        for source in sources:
            gm.graph.erase_node(source)
        delattr(gm, name)
    if names:
        gm.graph.lint()
        gm.recompile()


def replace_uses(node: Node, value: Argument) -> None:
    """Replace a node by another node or by a constant wherever it is read."""
    for reader in list(node.users):
        reader.args = map_arg(reader.args, lambda x: value if x is node else x)
        reader.kwargs = map_arg(reader.kwargs, lambda x: value if x is node else x)


def stack_of(call: Node) -> Stack:
    """The nn_module_stack of a call of a region, the layer innermost."""
    return call.meta.get("nn_module_stack") or {}


def path_in_layer(path: str, traced: Stack, actual: Stack) -> str:
    """A module path of the traced layer, in the form of `clean_path`, converted to the path in
    another layer.
    """
    old, new = clean_path(_innermost(traced)), clean_path(_innermost(actual))
    return new + path[len(old) :] if path == old or path.startswith(old + ".") else path


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


def _returned(body: GraphModule) -> Sequence[Argument]:
    outputs = body.graph.output_node().args[0]
    assert isinstance(outputs, tuple | list)
    return outputs


def _check_region(body: GraphModule, num_inputs: int, num_outputs: int) -> None:
    if (len(body.graph.find_nodes(op="placeholder")), len(_returned(body))) != (
        num_inputs,
        num_outputs,
    ):
        raise CannotInline("a region changes its signature")
    if _writes(body.graph):
        raise CannotInline("a region writes in place")
    if not all(isinstance(_value(output), Tensor) for output in _returned(body)):
        raise CannotInline("a region returns a value that is not a tensor")


def _check_operands(body: GraphModule, operands: Sequence[Argument], call: RegionCall) -> None:
    for placeholder, operand in zip(body.graph.find_nodes(op="placeholder"), operands, strict=True):
        if isinstance(_value(placeholder), Tensor) and not _same_layout(
            _tensor(placeholder), _tensor(operand)
        ):
            raise CannotInline(
                f"{clean_path(_innermost(call.stack))} reads {operand} with another shape, dtype "
                "or layout than the traced layer"
            )


def _value(operand: Argument) -> Argument | Value:
    return (
        operand.meta.get("val", operand.meta.get("example_value"))
        if isinstance(operand, Node)
        else operand
    )


def _tensor(operand: Argument) -> Tensor:
    value = _value(operand)
    assert isinstance(value, Tensor)
    return value


def _same_layout(a: Tensor, b: Tensor) -> bool:
    same = a.dtype == b.dtype and a.device == b.device and a.dim() == b.dim()
    return same and all(map(known_equal, (*a.shape, *a.stride()), (*b.shape, *b.stride())))


def _move_attributes(gm: GraphModule, body: GraphModule, name: str) -> None:
    """Move modules and constants of the region to the graph, with the region's name as prefix."""
    moved = {
        str(node.target): f"{name}_{node.target}" for node in body.graph.find_nodes(op="get_attr")
    }
    for node in body.graph.find_nodes(op="get_attr"):
        node.target = moved[str(node.target)]
    for old, new in moved.items():
        setattr(gm, new, getattr(body, old))


def _copy_body(
    graph: Graph,
    body: GraphModule,
    before: Node,
    operands: Sequence[Argument],
    traced: Stack,
    actual: Stack,
) -> list[Argument]:
    """Copy a region's nodes before a node of the graph; returns the copies of the region's
    outputs.
    """
    copies: dict[Node, Argument] = dict(
        zip(body.graph.find_nodes(op="placeholder"), operands, strict=True)
    )
    moved = _stack_mapper(_innermost(traced), _innermost(actual))
    with graph.inserting_before(before):
        for node in body.graph.nodes:
            if node.op in ("placeholder", "output"):
                continue
            copies[node] = copy = graph.node_copy(node, copies.__getitem__)
            if "nn_module_stack" in node.meta:
                copy.meta["nn_module_stack"] = moved(node.meta["nn_module_stack"])
    return [copies[output] if isinstance(output, Node) else output for output in _returned(body)]


def _stack_mapper(old: str, new: str) -> Callable[[Stack], Stack]:
    """A function that moves nn_module_stacks from one layer to another; nodes of one module
    continue to share theirs.
    """
    done: dict[int, Stack] = {}

    def moved(stack: Stack) -> Stack:
        if id(stack) not in done:
            done[id(stack)] = {
                key: (
                    new + entry[0][len(old) :] if entry[0].startswith(old) else entry[0],
                    *entry[1:],
                )
                for key, entry in stack.items()
            }
        return done[id(stack)]

    return (lambda stack: stack) if old == new or not old else moved
