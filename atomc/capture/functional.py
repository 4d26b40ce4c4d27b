"""From Dynamo's graph to a functional ATen graph, in two steps because each level knows what the other has lost.

On Dynamo's graph composite calls are lifted to ops and Python floats that became inputs are put back; then AOTAutograd
makes it functional, on fake tensors, each region once; regions are stamped; and it goes to the compiler below.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from atomc.capture.floats import put_back_floats
from atomc.capture.outline import outline
from atomc.capture.regions import every_layer
from atomc.capture.stamp import CannotStamp, Regions, inline, regions_of
from atomc.errors import SharingError
from atomc.graph.provenance import module_path
from atomc.torch_compat.names import FakeTensor, FakeTensorMode
from atomc.torch_compat.tracing import (
    RestartAnalysis,
    added_by_aot,
    fake_mode_of,
    functional_graph,
    own_copy,
    source_name,
    tracing_context,
)

Compiler = Callable[[GraphModule, Sequence[Any]], Callable[..., Any]]


def trace(
    gm: GraphModule, example_inputs: Sequence[Any], lift: Callable[[GraphModule], None], compiler: Compiler,
    floats: dict[int, float], notes: list[str],
) -> Callable[..., Any]:  # fmt: skip
    """Compile `gm` through `compiler`, which gets a functional ATen graph whose placeholder i is input i of `gm`.

    floats: input number -> the value to compile for. The result takes and returns what `gm` does. Regions are traced once
    and stamped; should that fail, every layer is traced, and a note says so.
    Raises SharingError if layers with weights of their own came as calls of a region with the same weights.
    """
    check_sharing(gm, example_inputs)
    copy = own_copy(gm)
    if not means_the_same_alone(copy):
        inline(copy)
    put_back_floats(copy, floats)
    if not regions_of(copy) and means_the_same_alone(copy):
        outline(copy)
    lift(copy)
    placeholders = copy.graph.find_nodes(op="placeholder")
    for node in placeholders:
        if not hasattr(node, "_dynamo_source"):
            node._dynamo_source = None
    fakes = [node.meta.get("example_value", given) for node, given in zip(placeholders, example_inputs, strict=True)]
    mode = fake_mode_of(copy.graph)
    if mode is not None:
        fakes = [mode.from_tensor(x, static_shapes=True) if isinstance(x, Tensor) and not isinstance(x, FakeTensor) else x
                 for x in fakes]  # fmt: skip
    sources = [source_name(node) for node in placeholders]

    reached: list[GraphModule] = []

    def with_sources(functional: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        reached.append(functional)
        check_effects(functional)
        for node, source in zip(functional.graph.find_nodes(op="placeholder"), sources, strict=True):
            node.meta["source"] = source
        return compiler(functional, inputs)

    if not regions_of(copy):
        return functional_graph(copy, fakes, with_sources)
    try:
        return by_regions(own_copy(copy), fakes, with_sources, notes)
    except RestartAnalysis:
        raise
    except Exception as error:  # whatever the tracer has against regions, it may have nothing against their nodes
        if reached:
            raise
        notes.append(every_layer(error))
        inline(copy)
        return functional_graph(copy, fakes, with_sources)


def by_regions(gm: GraphModule, fakes: Sequence[Any], compiler: Compiler, notes: list[str]) -> Callable[..., Any]:
    """As `trace`, of a graph with regions, which are traced once and stamped; the graph is used up."""
    made: list[Callable[..., Any]] = []
    mode = fake_mode_of(gm.graph)
    with Regions(gm, lambda body, inputs: traced_region(body, inputs, mode)) as regions:

        def stamp_first(functional: GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
            around = added_by_aot(functional, len(regions.kept))
            if around is not None:  # what it returns takes the inputs that it has seen
                raise CannotStamp(around)
            count = regions.stamp(functional)
            notes.append(f"{len(regions.bodies)} layers traced, {count} stamped")
            made.append(compiler(functional, [node.meta["val"] for node in functional.graph.find_nodes(op="placeholder")]))
            return made[0]

        functional_graph(gm, [fakes[i] for i in regions.kept], stamp_first)
    return made[0]


def traced_region(body: GraphModule, inputs: Sequence[Any], mode: FakeTensorMode | None) -> GraphModule:
    """The functional graph of a region, as if it were a graph of its own."""
    made: list[GraphModule] = []

    def keep(functional: GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        made.append(functional)
        return functional.forward

    for node in body.graph.find_nodes(op="placeholder"):
        node._dynamo_source = None
    with tracing_context(mode):
        functional_graph(body, inputs, keep)
    return made[0]


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


def means_the_same_alone(gm: GraphModule) -> bool:
    """Whether no node of the graph changes what the ops in a region mean, as autocast does."""
    return all(node.target is not torch.amp.autocast_mode._enter_autocast for node in gm.graph.nodes)


def wants_gradients(inputs: Sequence[Any]) -> bool:
    """Whether any input asks for a gradient."""
    return any(isinstance(x, Tensor) and x.requires_grad for x in inputs)
