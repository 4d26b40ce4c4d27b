"""From Dynamo's graph to a functional ATen graph, in two steps because each level knows what the other has lost.

On Dynamo's graph Python floats that became inputs are put back, and composite calls are lifted to ops; then AOTAutograd
makes it functional, on fake tensors, each region once; and regions are stamped.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from atomc.capture.floats import put_back_floats
from atomc.capture.inline_regions import CannotStamp, Regions, inline, regions_of
from atomc.capture.outline import outline
from atomc.capture.regions import every_layer
from atomc.errors import SharingError
from atomc.graph.inputs import set_graph_input
from atomc.graph.mutation import mutated
from atomc.graph.provenance import module_path
from atomc.ops.inputs import MODEL_INPUTS, StepInput
from atomc.torch_compat.names import FakeTensor, FakeTensorMode
from atomc.torch_compat.tracing import (
    RestartAnalysis,
    argument_of,
    fake_mode_of,
    functional_graph,
    own_copy,
    source_name,
    tracing_context,
)


@dataclass(frozen=True)
class Captured:
    """A functional ATen graph whose placeholder i is input i of Dynamo's graph.

    wrap    gives a callable which takes and returns what Dynamo's graph does, of one which does so for `graph`
    around  what the former does besides calling the latter; None: it is the latter
    written  the numbers of the inputs that the graph writes in place
    notes   for the report
    """

    graph: GraphModule
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
    around: str | None
    written: tuple[int, ...]
    notes: tuple[str, ...] = ()


def dynamo_graph(gm: GraphModule, example_inputs: Sequence[Any], floats: dict[int, float]) -> GraphModule:
    """A copy of Dynamo's graph, ready to be captured: repeated layers are regions, floats that became inputs constants.

    floats: input number -> the value to compile for.
    Raises SharingError if layers with weights of their own came as calls of a region with the same weights.
    """
    check_sharing(gm, example_inputs)
    copy = own_copy(gm)
    if not means_the_same_alone(copy):
        inline(copy)
    put_back_floats(copy, floats)
    if not regions_of(copy) and means_the_same_alone(copy):
        outline(copy)
    return copy


def capture(dynamo: GraphModule, example_inputs: Sequence[Any]) -> Captured:
    """The functional graph of what `dynamo_graph` made, which is used up.

    Regions are traced once and stamped; should that fail, every layer is traced, and a note says so.
    """
    placeholders = dynamo.graph.find_nodes(op="placeholder")
    for node in placeholders:
        if not hasattr(node, "_dynamo_source"):
            node._dynamo_source = None
    fakes = [node.meta.get("example_value", given) for node, given in zip(placeholders, example_inputs, strict=True)]
    mode = fake_mode_of(dynamo.graph)
    if mode is not None:
        fakes = [mode.from_tensor(x, static_shapes=True) if isinstance(x, Tensor) and not isinstance(x, FakeTensor) else x
                 for x in fakes]  # fmt: skip
    captured = _functional(dynamo, fakes)
    check_effects(captured.graph)
    for node, from_dynamo in zip(captured.graph.graph.find_nodes(op="placeholder"), placeholders, strict=True):
        node.meta["source"] = source_name(from_dynamo)
        name, dim = argument_of(from_dynamo) or ("", None)
        if name in MODEL_INPUTS:
            set_graph_input(node, StepInput(name, dim=dim))
    return captured


def _functional(dynamo: GraphModule, fakes: Sequence[Any]) -> Captured:
    if not regions_of(dynamo):
        return _flat(dynamo, fakes)
    try:
        return _by_regions(own_copy(dynamo), fakes)
    except RestartAnalysis:
        raise
    except Exception as error:  # whatever the tracer has against regions, it may have nothing against their nodes
        inline(dynamo)
        return _flat(dynamo, fakes, every_layer(error))


def _flat(dynamo: GraphModule, fakes: Sequence[Any], *notes: str) -> Captured:
    functional = functional_graph(dynamo, fakes)

    def wrap(compiled: Callable[..., Any]) -> Callable[..., Any]:
        functional.target.function = compiled
        return compiled if functional.around is None else functional.call

    return Captured(functional.graph, wrap, functional.around, written_inputs(functional.graph), notes)


def _by_regions(gm: GraphModule, fakes: Sequence[Any]) -> Captured:
    """Of a graph with regions, which are traced once and stamped; the graph is used up."""
    mode = fake_mode_of(gm.graph)
    with Regions(gm, lambda body, inputs: traced_region(body, inputs, mode)) as regions:
        functional = functional_graph(gm, [fakes[i] for i in regions.kept])
        if functional.around is not None:  # what it returns takes the inputs that it has seen
            raise CannotStamp(functional.around)
        count = regions.stamp(functional.graph)
    note = f"{len(regions.bodies)} layers traced, {count} stamped"
    return Captured(functional.graph, lambda compiled: compiled, None, written_inputs(functional.graph), (note,))


def traced_region(body: GraphModule, inputs: Sequence[Any], mode: FakeTensorMode | None) -> GraphModule:
    """The functional graph of a region, as if it were a graph of its own."""
    for node in body.graph.find_nodes(op="placeholder"):
        node._dynamo_source = None
    with tracing_context(mode):
        return functional_graph(body, inputs).graph


def check_sharing(gm: GraphModule, example_inputs: Sequence[Any]) -> None:
    """Raise SharingError if Dynamo took one layer for another.

    torch 2.13 does so for layers that it reaches by a bound method, such as those that accelerate puts hooks on.
    """
    inputs = dict(zip(gm.graph.find_nodes(op="placeholder"), example_inputs, strict=True))
    for calls in regions_of(gm).values():
        paths: dict[tuple[Node, ...], str] = {}
        for call in calls:
            weights = tuple(x for x in call.args[2:] if isinstance(x, Node) and isinstance(inputs.get(x), nn.Parameter))
            path = module_path(call)
            if weights and paths.setdefault(weights, path) != path:
                raise SharingError(f"torch.compile gives {path} the weights of {paths[weights]}: it cannot tell the "
                                   "prepared layers apart; call atomc.unprepare(model) first")  # fmt: skip


def check_effects(functional: GraphModule) -> None:
    """Raise NotImplementedError if ops have effects besides their results, which AOTAutograd orders by more inputs."""
    effects = {str(node.args[1]) for node in functional.graph.nodes if node.target is torch.ops.higher_order.with_effects}
    if effects:
        raise NotImplementedError(f"{', '.join(sorted(effects))} does more than give a result: such are not ordered here")


def written_inputs(functional: GraphModule) -> tuple[int, ...]:
    """The numbers of the inputs that the graph writes in place."""
    targets = {target for node in functional.graph.nodes for target in mutated(node)}
    return tuple(i for i, node in enumerate(functional.graph.find_nodes(op="placeholder")) if node in targets)


def means_the_same_alone(gm: GraphModule) -> bool:
    """Whether no node of the graph changes what the ops in a region mean, as autocast does."""
    return all(node.target is not torch.amp.autocast_mode._enter_autocast for node in gm.graph.nodes)


def wants_gradients(inputs: Sequence[Any]) -> bool:
    """Whether any input asks for a gradient."""
    return any(isinstance(x, Tensor) and x.requires_grad for x in inputs)
