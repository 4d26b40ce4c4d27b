"""Regions of a graph, which Dynamo traced once for many layers, put in the place of each call.

    y = invoke_subgraph(region, x, weights of layer 3)    =>    the region's nodes, reading x and the weights of layer 3

Between Dynamo's graph and the functional one a call is one opaque op, so that AOTAutograd sees each region once, by
itself. Copies know the layer they stand for: their module path is the call's, not that of the layer that was traced.
"""

import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from atomc.provenance import clean_path
from atomc.sizes import known_equal
from atomc.torch_tracing import INVOKE_SUBGRAPH

Stack = Mapping[str, Any]

_LIBRARY = torch.library.Library("atom", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(  # type: ignore[no-untyped-call]
    "region(int number, Tensor[] tensors, SymInt[] sizes) -> Tensor[]", tags=(torch.Tag.pt2_compliant_tag,))
_REGION = torch.ops.atom.region.default
_numbers = itertools.count()
_outputs: dict[int, list[Tensor]] = {}  # of the regions being traced


def _like_traced(number: int, tensors: list[Tensor], sizes: list[int]) -> list[Tensor]:
    return [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) for x in _outputs[number]]


torch.library.register_fake("atom::region", _like_traced, lib=_LIBRARY)


class CannotStamp(Exception):
    """Regions whose calls are not all alike; the message says why."""


def regions_of(gm: GraphModule) -> dict[str, list[Node]]:
    """The calls of each region in Dynamo's graph, in order, by the region's name."""
    calls: dict[str, list[Node]] = {}
    for node in gm.graph.find_nodes(op="call_function", target=INVOKE_SUBGRAPH):
        source = node.args[0]
        assert isinstance(source, Node)
        calls.setdefault(str(source.target), []).append(node)
    return calls


def region(gm: GraphModule, name: str) -> GraphModule:
    """The region of that name."""
    found = gm.get_submodule(name)
    assert isinstance(found, GraphModule)
    return found


class Regions:
    """The regions of one graph of Dynamo's, on their way to a functional graph.

    with Regions(gm, functional) as regions:      functional(body, inputs) -> the functional graph of one region
        ...                                       gm is traced; its calls are opaque ops
        regions.stamp(traced)                     and become nodes again
    """

    def __init__(self, gm: GraphModule, functional: Callable[[GraphModule, Sequence[Any]], GraphModule]):
        self.gm, self.functional = gm, functional
        self.bodies: dict[int, GraphModule] = {}
        self.traced: dict[int, Stack] = {}

    def __enter__(self) -> "Regions":
        for name, calls in regions_of(self.gm).items():
            body = region(self.gm, name)
            inline(body)
            number = next(_numbers)
            inputs = [node.meta["example_value"] for node in body.graph.find_nodes(op="placeholder")]
            num_outputs = len(_returned(body))
            self.bodies[number], self.traced[number] = self.functional(body, inputs), stack_of(calls[0])
            _check(self.bodies[number], len(inputs), num_outputs)
            _outputs[number] = [_value(output) for output in _returned(self.bodies[number])]
            for call in calls:
                _make_opaque(self.gm.graph, call, number)
            delattr(self.gm, name)
        self.gm.graph.lint()
        self.gm.recompile()
        return self

    def __exit__(self, *_: object) -> None:
        for number in self.bodies:
            _outputs.pop(number, None)

    def stamp(self, gm: GraphModule) -> int:
        """Replace every opaque call by the functional nodes; how many there were. Copies share their values (`val`)."""
        calls = [node for node in gm.graph.nodes if node.target is _REGION]
        if _writes(gm.graph):
            raise CannotStamp("the graph writes in place")  # shared values know nothing of aliases in another layer
        for call in calls:
            self._check_operands(call)
        for number, body in self.bodies.items():
            _hoist(gm, body, f"region_{number}")
        for call in calls:
            number = call.args[0]
            assert isinstance(number, int)
            _inline(gm.graph, self.bodies[number], call, self._operands(call), self.traced[number])
        gm.graph.lint()
        gm.recompile()
        return len(calls)

    def _operands(self, call: Node) -> list[Any]:
        number, tensors, sizes = call.args
        assert isinstance(number, int) and isinstance(tensors, list | tuple) and isinstance(sizes, list | tuple)
        given = {True: iter(tensors), False: iter(sizes)}
        return [next(given[isinstance(_value(node), Tensor)]) for node in self._placeholders(number)]

    def _placeholders(self, number: Any) -> list[Node]:
        return list(self.bodies[number].graph.find_nodes(op="placeholder"))

    def _check_operands(self, call: Node) -> None:
        for placeholder, operand in zip(self._placeholders(call.args[0]), self._operands(call), strict=True):
            if isinstance(_value(placeholder), Tensor) and not _alike(_value(placeholder), _value(operand)):
                raise CannotStamp(f"{call.name} reads {operand} in another shape, dtype or layout than the traced layer")


def _make_opaque(graph: Graph, call: Node, number: int) -> None:
    source, _, *operands = call.args
    assert isinstance(source, Node)
    tensors = [x for x in operands if isinstance(_value(x), Tensor)]
    sizes = [x for x in operands if not isinstance(_value(x), Tensor)]
    call.target, call.args = _REGION, (number, tensors, sizes)
    if not source.users:
        graph.erase_node(source)


def inline(gm: GraphModule) -> None:
    """Replace every call of a region by copies of the region's nodes, in place."""
    names = regions_of(gm)
    for name, calls in names.items():
        body = region(gm, name)
        inline(body)
        _hoist(gm, body, name)
        sources = {call.args[0] for call in calls}
        for call in calls:
            _inline(gm.graph, body, call, call.args[2:], stack_of(calls[0]))
        for source in sources:
            gm.graph.erase_node(source)  # type: ignore[arg-type]
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


def _inline(graph: Graph, body: GraphModule, call: Node, operands: Sequence[Any], traced: Stack) -> None:
    copies: dict[Node, Any] = dict(zip(body.graph.find_nodes(op="placeholder"), operands, strict=True))
    moved = _mover(_innermost(traced), _innermost(stack_of(call)))
    with graph.inserting_before(call):
        for node in body.graph.nodes:
            if node.op in ("placeholder", "output"):
                continue
            copies[node] = made = graph.node_copy(node, copies.__getitem__)
            if "nn_module_stack" in node.meta:
                made.meta["nn_module_stack"] = moved(node.meta["nn_module_stack"])
    for reader in list(call.users):
        assert reader.target is operator.getitem
        output = _returned(body)[reader.args[1]]  # type: ignore[index]
        reader.replace_all_uses_with(copies[output] if isinstance(output, Node) else output)
        graph.erase_node(reader)
    graph.erase_node(call)


def _mover(old: str, new: str) -> Callable[[Stack], Stack]:
    """Rewrites module stacks, of which a layer has few; the nodes of one module keep sharing theirs."""
    done: dict[int, Stack] = {}

    def moved(stack: Stack) -> Stack:
        if id(stack) not in done:
            done[id(stack)] = {key: (new + entry[0][len(old):] if entry[0].startswith(old) else entry[0], *entry[1:])
                               for key, entry in stack.items()}  # fmt: skip
        return done[id(stack)]

    return (lambda stack: stack) if old == new or not old else moved

