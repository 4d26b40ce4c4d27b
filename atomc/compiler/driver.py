"""The way of a graph: from the cache, or captured > passes > lowered, per range of token counts >
glue.

`build` is what the backend and the runtime call, `compile_graph` what explain does.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from atomc import passes
from atomc.audit.recorder import Recorder
from atomc.cache.compiled import Compiled, combine_ranges, serialize_compiled
from atomc.cache.generated import Function, of_graph
from atomc.cache.graph_cache import GraphCache
from atomc.cache.store import ProgramData
from atomc.capture.functional import Captured, capture, dynamo_graph
from atomc.capture.inline_regions import inline, path_in_layer, region, regions_of, stack_of
from atomc.compiler import pipeline, ranges
from atomc.compiler.partition import FEW_OPS, compile_glue, glue_of, left_for_glue
from atomc.compiler.select import Selection
from atomc.cost import cost
from atomc.cost.fusion_opportunities import fusion_opportunities
from atomc.cost.quantized_weights import quantized_weights
from atomc.dumps.dump import Dumper
from atomc.graph import structured_trace
from atomc.graph.inputs import graph_input
from atomc.graph.profiler_ranges import profiled
from atomc.graph.provenance import layer_of
from atomc.ops.inputs import StateInput, StepInput
from atomc.ops.op import Extra, Tokens
from atomc.ops.state import StateSpec
from atomc.options import Options
from atomc.report.records import Glue, OpCost
from atomc.report.report import Report
from atomc.report.report_data import Machine
from atomc.rewriting.graph_pass import Context
from atomc.torch_compat.core import without_autocast
from atomc.torch_compat.inductor import mode_options
from atomc.weights.prepared import unpreparable

T = TypeVar("T")


@dataclass(frozen=True)
class Built:
    """A graph of Dynamo's, compiled or found in the cache.

    written  the numbers of the inputs that it writes in place
    wrap     makes of a callable of the functional graph's inputs one of those of Dynamo's graph
    entry    what the cache holds of it now, None if nothing
    key      what the cache calls it, None where it was not asked
    """

    compiled: Compiled
    written: Sequence[int]
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
    entry: ProgramData | None
    key: str | None


def build(
    gm: GraphModule,
    inputs: Sequence[Any],
    context: Context,
    report: Report,
    floats: dict[int, float],
) -> Built:
    """What an earlier start has kept of the graph with these floats, or all stages, kept for later
    ones.

    floats: input number -> the value of a Python float that Dynamo made an input.
    """
    cache = GraphCache(gm, inputs, context, report, floats)
    found = cache.load()
    if found is not None:
        return Built(*found, lambda call: call, cache.entry, cache.key)
    captured, compiled = compile_graph(gm, inputs, context, report, floats)
    cache.store(compiled, captured.written, captured.around)
    return Built(compiled, captured.written, captured.wrap, cache.entry, cache.key)


def compile_graph(
    gm: GraphModule,
    inputs: Sequence[Any],
    context: Context,
    report: Report,
    floats: dict[int, float],
) -> tuple[Captured, Compiled]:
    """All stages for a graph of Dynamo's. If nothing is to be built, `call` is the captured graph's
    forward.
    """
    with timed(report, "trace"):
        dynamo = dynamo_graph(gm, inputs, floats)
    lift(dynamo, context, report)
    with timed(report, "trace"):
        captured = capture(dynamo, inputs)
    report.notes += captured.notes
    with without_autocast():
        return captured, _compiled(captured.graph, context, report)


@contextmanager
def timed(report: Report, phase: str) -> Iterator[None]:
    start = time.perf_counter()
    try:
        yield
    finally:
        report.phases[phase] = report.phases.get(phase, 0.0) + time.perf_counter() - start


def inductor_patches(options: Options) -> dict[str, Any]:
    """Inductor's configuration for these options."""
    patches = {
        name: on for name, on in mode_options(options.mode).items() if "cudagraph" not in name
    }
    if options.rounding == "hf":
        patches["emulate_precision_casts"] = True
    return {**patches, **options.inductor}


def lift(dynamo: GraphModule, context: Context, report: Report) -> None:
    """Lift composite calls of Dynamo's graph, in place: of a region once, in the report for each of
    its calls.
    """
    chosen = context.options.passes.get(pipeline.LIFT, True)
    if chosen is False:
        return
    if chosen is not True:
        inline(dynamo)  # layers that are lifted differently are no calls of one region
    with timed(report, "lift"):
        pipeline.run(dynamo, [passes.LIFT], context, report, structured_trace.observers())
        for name, calls in regions_of(dynamo).items():
            once = Report(report.model)
            lift(region(dynamo, name), context, once)
            report.stages += once.stages
            for call in calls:
                report.matches += once.matches
                for site in once.sites:
                    path = path_in_layer(site.module_path, stack_of(calls[0]), stack_of(call))
                    report.sites.append(replace(site, module_path=path, layer=layer_of(path)))


def _compiled(gm: GraphModule, context: Context, report: Report) -> Compiled:
    """Passes, lowering per range and glue of a functional graph."""
    options = context.options
    chosen, report.off = pipeline.selected(passes.PIPELINE, context)
    dumper = Dumper(options.dump)
    observers = [
        lambda name, graph: dumper(graph, name),
        *structured_trace.observers(),
        *context.observers,
    ]
    recorder = (
        Recorder(gm, options, report, dumper)
        if context.build and (options.audit or options.record)
        else None
    )
    for observer in observers:
        observer("captured", gm)
    with timed(report, "passes"):
        done = pipeline.run(gm, chosen, context, report, observers)
        costs = cost.graph_costs(gm)
    if recorder:
        recorder.passes_done()
    how, why = glue_of(options, context.platform)
    _note_glue(report, how, f"{how} ({why})")
    _describe(gm, costs, context, report, glue_fuses=how != "eager")
    lowered = _lowered(gm, context, report, observers, eager=how == "eager")
    functions = []
    for one in lowered:
        with timed(report, "glue"):
            seen = copy_graph(one.graph) if recorder else one.graph
            function = _glue(one.graph, how, options, report) if context.build else of_graph(gm)
            functions.append(recorder.wrap(seen, function) if recorder else function)
    layout = lowered[0].layout
    state = [spec.in_layout(layout) if layout else spec for spec in done.state]
    report.state = [str(spec) for spec in state]
    return _assembled(gm, lowered, functions, state)


def _describe(
    gm: GraphModule,
    costs: list[cost.NodeCost],
    context: Context,
    report: Report,
    *,
    glue_fuses: bool,
) -> None:
    """What the report says of the graph before it is lowered."""
    platform = context.platform
    report.machine = Machine(
        name=platform.name,
        arch=platform.arch,
        device=platform.device,
        bandwidth=platform.bandwidth,
        flops=platform.flops,
    )
    report.costs, report.few_bits = [_op_cost(c) for c in costs], quantized_weights(gm)
    if context.keep_texts:
        report.savings = fusion_opportunities(gm, costs, report.near, glue_fuses=glue_fuses)


@dataclass(frozen=True)
class Lowered:
    """A graph lowered for one range of token counts.

    layout  how the state lies, None without state
    extras  the inputs that lowering added
    read    the inputs that its nodes read
    syncing kernels that no CUDA graph can hold
    """

    graph: GraphModule
    tokens: Tokens
    layout: str | None
    extras: list[Extra]
    read: set[str]
    syncing: list[str]


def _lowered(
    gm: GraphModule,
    context: Context,
    report: Report,
    observers: Sequence[pipeline.Observer],
    *,
    eager: bool,
) -> list[Lowered]:
    """The graph for each range of token counts that kernels tell apart, one layout of state in all
    of them.
    """
    inputs = gm.graph.find_nodes(op="placeholder")
    weights = {
        node.name: unpreparable(given) for node, given in zip(inputs, context.inputs, strict=False)
    }
    weights |= {node.name: None for node in inputs if "packed" in node.meta}
    select = partial(
        Selection, context.options, context.platform, eager=eager, weights=weights, copied={}
    )
    spans = ranges.ranges_of(gm, select().could_serve)
    layout = None
    lowered = []
    for span in spans:
        with timed(report, "lower"):
            one = copy_graph(gm) if len(spans) > 1 else gm
            one.meta["tokens"] = span
            selection = select(layout=layout, tokens=span)
            layout = layout or selection.fix_layout(list(one.graph.nodes))
            done = pipeline.run(
                one, [passes.LOWER], replace(context, choose=selection.choose), report, observers
            )
            report.kernels += selection.choices
            read = {node.name for node in one.graph.find_nodes(op="placeholder") if node.users}
            lowered.append(Lowered(one, span, layout, done.extras, read, selection.syncing))
    return lowered


def _assembled(
    gm: GraphModule,
    lowered: Sequence[Lowered],
    functions: Sequence[Function],
    state: Sequence[StateSpec],
) -> Compiled:
    """One callable of the functions for each range, and how to make plain data of it."""
    inputs = [node for node in gm.graph.find_nodes(op="placeholder") if "extra" not in node.meta]
    names = [node.name for node in inputs]
    packed = {node.name: node.meta["packed"] for node in inputs if "packed" in node.meta}
    read = [name for name in names if any(name in one.read for one in lowered)]
    extras: list[Extra] = []
    extras_of: list[tuple[int, int, int]] = []
    for one in lowered:
        extras_of.append((len(inputs), len(extras), len(one.extras)))
        extras += one.extras
    chosen_by, device = ranges.dispatch(gm, [one.tokens for one in lowered]), _device(gm)
    syncing = [name for one in lowered for name in one.syncing]
    call = profiled(
        combine_ranges([function.call for function in functions], extras_of, chosen_by, device),
        lambda: combine_ranges(
            [function.named() for function in functions], extras_of, chosen_by, device
        ),
    )

    compiled = Compiled(
        call,
        names,
        packed,
        _of_type(StepInput, inputs),
        _of_type(StateInput, inputs),
        list(state),
        extras,
        syncing,
        read,
    )
    return replace(
        compiled,
        plain=lambda: serialize_compiled(
            compiled, [function.plain() for function in functions], extras_of, chosen_by, device
        ),
    )


def _of_type(kind: type[T], inputs: Sequence[Node]) -> dict[str, T]:
    """Those of the inputs that the runtime passes as this kind, by name."""
    return {node.name: given for node in inputs if isinstance(given := graph_input(node), kind)}


def _op_cost(found: cost.NodeCost) -> OpCost:
    nodes = [node.name for node in found.nodes]
    made_of = sorted(
        set[str]().union(*(node.meta.get("origins", {node.name}) for node in found.nodes))
    )
    apart = str(found.apart) if found.apart != found.cost.bytes else ""
    return OpCost(
        found.op,
        found.module_path,
        found.layer,
        found.source,
        str(found.cost.bytes),
        str(found.cost.flops),
        nodes,
        made_of,
        apart,
        str(found.nodes[-1].meta.get("made_by", "")),
    )


def _device(gm: GraphModule) -> str | None:
    """The GPU that the graph's tensors lie on."""
    values = [node.meta.get("val") for node in gm.graph.find_nodes(op="placeholder")]
    return next(
        (str(x.device) for x in values if isinstance(x, Tensor) and x.device.type == "cuda"), None
    )


def _glue(gm: GraphModule, how: str, options: Options, report: Report) -> Function:
    if how == "eager":
        return of_graph(gm)
    if options.glue == "auto" and (count := left_for_glue(gm)) <= FEW_OPS:
        _note_glue(
            report,
            "eager",
            f"eager here: {count} ops stand between kernels, not worth starting Inductor",
        )
        return of_graph(gm)
    function, pieces = compile_glue(gm, inductor_patches(options))
    _note_glue(report, how, pieces)
    return function


def _note_glue(report: Report, how: str, text: str) -> None:
    note = f"glue: {text}"
    report.notes.append(note)
    report.glue.append(Glue(how, note))


def copy_graph(gm: GraphModule) -> GraphModule:
    """The same graph again, to be lowered for another range; values and metadata are shared."""
    graph = torch.fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    return GraphModule(gm, graph)
