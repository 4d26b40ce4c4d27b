"""Converts Dynamo's graph to a functional ATen graph in two steps.

1. On Dynamo's graph, Python floats that became inputs are made constants or tensors, and composite
   calls are lifted to ops.
2. AOTAutograd traces the graph on fake tensors, each region once; then the regions are inlined.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from atomc.capture.attention_lengths import guard_attention_lengths
from atomc.capture.floats import restore_float_constants
from atomc.capture.inline_regions import CannotInline, TracedRegions, inline, regions_of
from atomc.capture.outline import outline
from atomc.capture.regions import region_failure_note
from atomc.capture.variable_floats import read_as_tensors
from atomc.errors import SharingError
from atomc.graph.mutation import mutated
from atomc.graph.node_record import NodeRecord, set_record
from atomc.graph.provenance import module_path
from atomc.graph.variable_float import FloatInput
from atomc.ops.inputs import MODEL_INPUTS, StepInput
from atomc.torch_compat.core import FakeTensor, FakeTensorMode, GraphFunction, Input
from atomc.torch_compat.tracing import (
    RestartAnalysis,
    argument_of,
    editable_copy,
    fake_mode_of,
    functional_graph,
    lifted_floats,
    source_name,
    tracing_context,
)


@dataclass(frozen=True)
class CapturedGraph:
    """A functional ATen graph whose placeholder i is input i of Dynamo's graph.

    wrap     converts a callable with the signature of `graph` to one with the signature of Dynamo's
             graph
    around   the additional work of the wrapped callable; None: `wrap` returns its argument
    written  the numbers of the inputs that the graph writes in place
    notes    for the report
    """

    graph: GraphModule
    wrap: Callable[[GraphFunction], GraphFunction]
    around: str | None
    written: tuple[int, ...]
    notes: tuple[str, ...] = ()


def dynamo_graph(
    gm: GraphModule, example_inputs: Sequence[Input], floats: dict[int, float]
) -> GraphModule:
    """A copy of Dynamo's graph, prepared for `capture`: repeated layers are regions; floats that
    are inputs are constants or tensors.

    floats: number of an input that is a constant -> its value.
    Raises SharingError if Dynamo passes the weights of one layer to the region call of another
    layer.
    """
    check_sharing(gm, example_inputs)
    copy = editable_copy(gm)
    guard_attention_lengths(copy)
    if not has_no_autocast(copy):
        inline(copy)
    restore_float_constants(copy, floats)
    read_as_tensors(copy, floats)
    if not regions_of(copy) and has_no_autocast(copy):
        outline(copy)
    return copy


def capture(dynamo: GraphModule, example_inputs: Sequence[Input]) -> CapturedGraph:
    """The functional graph of a result of `dynamo_graph`, which is modified.

    Each region is traced once and then inlined. If that fails, every layer is traced, and a note
    says so.
    """
    placeholders = dynamo.graph.find_nodes(op="placeholder")
    for node in placeholders:
        if not hasattr(node, "_dynamo_source"):
            node._dynamo_source = None
    fakes = [
        node.meta.get("example_value", argument)
        for node, argument in zip(placeholders, example_inputs, strict=True)
    ]
    mode = fake_mode_of(dynamo.graph)
    if mode is not None:
        fakes = [
            mode.from_tensor(x, static_shapes=True)
            if isinstance(x, Tensor) and not isinstance(x, FakeTensor)
            else x
            for x in fakes
        ]
    captured = _capture(dynamo, fakes)
    check_effects(captured.graph)
    inputs = captured.graph.graph.find_nodes(op="placeholder")
    floats = lifted_floats(dynamo.graph)
    if len(inputs) != len(placeholders):
        raise NotImplementedError(
            "the graph writes an input that shares memory with another: AOTAutograd computes both "
            "from one base, which atomc does not support; pass tensors of their own memory"
        )
    for node, from_dynamo, argument in zip(inputs, placeholders, example_inputs, strict=True):
        float_input = None
        if from_dynamo in floats and argument is not None:
            float_input = FloatInput(from_dynamo, float(argument))
        name, dim = argument_of(from_dynamo) or ("", None)
        record = NodeRecord(
            source=source_name(from_dynamo),
            float_input=float_input,
            input=StepInput(name, dim=dim) if name in MODEL_INPUTS else None,
        )
        set_record(node, record)
    return captured


def _capture(dynamo: GraphModule, fakes: Sequence[Input]) -> CapturedGraph:
    if not regions_of(dynamo):
        return _trace_flat(dynamo, fakes)
    try:
        return _trace_by_regions(editable_copy(dynamo), fakes)
    except RestartAnalysis:
        raise
    except Exception as error:  # tracing may fail for a region and succeed for its nodes
        inline(dynamo)
        return _trace_flat(dynamo, fakes, region_failure_note(error))


def _trace_flat(dynamo: GraphModule, fakes: Sequence[Input], *notes: str) -> CapturedGraph:
    functional = functional_graph(dynamo, fakes)

    def wrap(compiled: GraphFunction) -> GraphFunction:
        functional.target.function = compiled
        return compiled if functional.around is None else functional.call

    return CapturedGraph(
        functional.graph, wrap, functional.around, written_inputs(functional.graph), notes
    )


def _trace_by_regions(gm: GraphModule, fakes: Sequence[Input]) -> CapturedGraph:
    """Trace a graph with regions, each region once, and inline them. Modifies the graph."""
    mode = fake_mode_of(gm.graph)
    with TracedRegions(gm, lambda body, inputs: traced_region(body, inputs, mode)) as regions:
        functional = functional_graph(gm, [fakes[i] for i in regions.kept])
        if functional.around is not None:  # its wrapper takes only the inputs in `kept`
            raise CannotInline(functional.around)
        count = regions.inline_calls(functional.graph)
    number = len(regions.bodies)
    note = f"{number} layer{'s' * (number != 1)} traced, {count} inlined"
    return CapturedGraph(
        functional.graph, lambda compiled: compiled, None, written_inputs(functional.graph), (note,)
    )


def traced_region(
    body: GraphModule, inputs: Sequence[Input], mode: FakeTensorMode | None
) -> GraphModule:
    """The functional graph of a region, as if it were a graph of its own."""
    for node in body.graph.find_nodes(op="placeholder"):
        node._dynamo_source = None
    with tracing_context(mode):
        return functional_graph(body, inputs).graph


def check_sharing(gm: GraphModule, example_inputs: Sequence[Input]) -> None:
    """Raise SharingError if Dynamo reused the weights of one layer for another.

    torch 2.13 does so for layers called through a bound method, such as those with hooks of
    accelerate.
    """
    inputs = dict(zip(gm.graph.find_nodes(op="placeholder"), example_inputs, strict=True))
    for calls in regions_of(gm).values():
        paths: dict[tuple[Node, ...], str] = {}
        for call in calls:
            weights = tuple(
                x
                for x in call.args[2:]
                if isinstance(x, Node) and isinstance(inputs.get(x), nn.Parameter)
            )
            path = module_path(call)
            if weights and paths.setdefault(weights, path) != path:
                raise SharingError(
                    f"torch.compile uses the weights of {paths[weights]} for {path}: it does not "
                    "distinguish the prepared layers; call atomc.unprepare(model) first"
                )


def check_effects(functional: GraphModule) -> None:
    """Raise NotImplementedError for ops with side effects, which AOTAutograd orders with token
    inputs.
    """
    effects = {
        str(node.args[1])
        for node in functional.graph.nodes
        if node.target is torch.ops.higher_order.with_effects
    }
    if effects:
        raise NotImplementedError(
            f"ops with side effects are not supported: {', '.join(sorted(effects))}"
        )


def written_inputs(functional: GraphModule) -> tuple[int, ...]:
    """The numbers of the inputs that the graph writes in place."""
    targets = {target for node in functional.graph.nodes for target in mutated(node)}
    return tuple(
        i for i, node in enumerate(functional.graph.find_nodes(op="placeholder")) if node in targets
    )


def has_no_autocast(gm: GraphModule) -> bool:
    """Whether the graph does not enter autocast, which would change the result of ops in a
    region.
    """
    return all(
        node.target is not torch.amp.autocast_mode._enter_autocast for node in gm.graph.nodes
    )


def wants_gradients(inputs: Sequence[Input]) -> bool:
    """Whether any input requires a gradient."""
    return any(isinstance(x, Tensor) and x.requires_grad for x in inputs)
