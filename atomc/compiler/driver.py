"""The path of a graph from Dynamo to a callable.

    cache -------------------------------------------------------------> Compiled
    dynamo > lift > capture > passes > lower, per token range > glue --> Compiled

`build` is the entry for the backend and the runtime, `compile_graph` for explain.
"""

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch.fx import GraphModule, Node

from atomc import kernels, passes
from atomc.audit.recorder import Recorder
from atomc.cache.compiled import Compiled
from atomc.cache.generated import CompiledFunction, graph_function
from atomc.cache.graph_cache import GraphCache
from atomc.cache.store import ProgramData
from atomc.capture.functional import CapturedGraph, capture, dynamo_graph
from atomc.capture.inline_regions import inline, path_in_layer, region, regions_of, stack_of
from atomc.capture.variable_floats import show_as_numbers, show_as_tensors
from atomc.compiler import pipeline
from atomc.compiler.assemble import assemble
from atomc.compiler.kernels_ahead import compiling_kernels
from atomc.compiler.lower_ranges import copy_graph, lower_ranges
from atomc.compiler.partition import compile_glue, glue_of
from atomc.compiler.phases import timed
from atomc.compiler.select import Selection
from atomc.compiler.sink_pointwise import sink_pointwise
from atomc.compiler.summarize_graph import summarize_graph
from atomc.compiler.worth_inductor import why_eager
from atomc.dumps.dump import Dumper
from atomc.files.json_types import JSONLike
from atomc.graph import structured_trace
from atomc.graph.provenance import layer_of
from atomc.options import Options
from atomc.report.records import Glue
from atomc.report.report import Report
from atomc.rewriting.graph_pass import Context
from atomc.torch_compat.core import GraphFunction, without_autocast
from atomc.torch_compat.inductor import finds_wrong_attention, load_inductor, mode_options


@dataclass(frozen=True)
class Built:
    """A graph of Dynamo, compiled or loaded from the cache.

    written  numbers of the inputs that it writes in place
    wrap     converts a callable of the functional graph's inputs to one of the inputs of Dynamo's
             graph
    entry    the content of its cache entry, None if there is none
    key      its cache key, None if the cache was not used
    """

    compiled: Compiled
    written: Sequence[int]
    wrap: Callable[[GraphFunction], GraphFunction]
    entry: ProgramData | None
    key: str | None


def build(gm: GraphModule, context: Context, report: Report, floats: dict[int, float]) -> Built:
    """Load the graph with these floats from the cache, or compile it and store it there.

    floats: number of an input -> the value of a Python float that Dynamo made an input, and that is
    a constant.
    """
    cache = GraphCache(gm, context, report, floats)
    loaded = cache.load()
    if loaded is not None:
        return Built(*loaded, lambda call: call, cache.entry, cache.key)
    if context.platform.kind != "cpu":
        kernels.start_triton()
    with _old_objects_frozen():
        captured, compiled = compile_graph(gm, context, report, floats)
    cache.store(compiled, captured.written, captured.around)
    return Built(compiled, captured.written, captured.wrap, cache.entry, cache.key)


@contextlib.contextmanager
def _old_objects_frozen() -> Iterator[None]:
    """A context in which garbage is sought among new objects only. Torch, transformers and a model
    are a million objects; to look at all takes 0.3 s, up to three times in a compile.
    """
    if gc.get_freeze_count():  # by the user, who would find them unfrozen
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def compile_graph(
    gm: GraphModule, context: Context, report: Report, floats: dict[int, float]
) -> tuple[CapturedGraph, Compiled]:
    """Run all stages on a graph of Dynamo. Without `context.build`, the result calls the graph as
    captured.
    """
    with timed(report, "trace"):
        dynamo = dynamo_graph(gm, context.inputs, floats)
    _lift(dynamo, context, report)
    with timed(report, "trace"):
        captured = capture(dynamo, context.inputs)
    report.notes += captured.notes
    with without_autocast():
        return captured, _compile_captured(captured.graph, context, report)


def _lift(dynamo: GraphModule, context: Context, report: Report) -> None:
    """Lift composite calls of Dynamo's graph, in place. A region is lifted once and reported for
    each of its calls.
    """
    switch = context.options.passes.get(pipeline.LIFT, True)
    if switch is False:
        return
    if switch is not True:
        inline(dynamo)  # modules that are lifted differently cannot share a region
    with timed(report, "lift"):
        traced = replace(context, observers=structured_trace.observers())
        pipeline.run(dynamo, [passes.LIFT], traced, report)
        for name, calls in regions_of(dynamo).items():
            _lift_region(region(dynamo, name), calls, context, report)


def _lift_region(
    body: GraphModule, calls: Sequence[Node], context: Context, report: Report
) -> None:
    once = Report(report.model)
    _lift(body, context, once)
    report.stages += once.stages
    for call in calls:
        report.matches += once.matches
        for site in once.sites:
            path = path_in_layer(site.module_path, stack_of(calls[0]), stack_of(call))
            report.sites.append(replace(site, module_path=path, layer=layer_of(path)))


def _compile_captured(gm: GraphModule, context: Context, report: Report) -> Compiled:
    """Passes, then lowering and glue per range of token counts, of a functional graph."""
    options = context.options
    selected, report.off = pipeline.selected(passes.PIPELINE, context)
    if not context.paged:
        report.runtime_only = pipeline.runtime_only(passes.PIPELINE)
    report.optional = [
        p.name for p in passes.PIPELINE if p.off_by_default and p.name not in options.passes
    ]
    dumper = Dumper(options.dump)
    observers = (
        lambda name, graph: dumper(graph, name),
        *structured_trace.observers(),
        *context.observers,
    )
    context = replace(context, observers=observers)
    recording = context.build and (options.audit or options.record)
    recorder = Recorder(gm, options, report, dumper) if recording else None
    for observer in observers:
        observer("captured", gm)

    glue, why = glue_of(options, context.platform)
    select = partial(Selection, options, context.platform, eager=glue == "eager")
    # Another selection for each question: passes change nodes in between.
    context = replace(context, first=lambda node: select().first(node))
    with timed(report, "passes"):
        show_as_numbers(gm.graph)
        outcome = pipeline.run(gm, selected, context, report)
        show_as_tensors(gm.graph, outcome.floats)
    if recorder:
        recorder.passes_done()

    _note_glue(report, glue, f"{glue} ({why})")
    summarize_graph(gm, context, report, glue_fuses=glue != "eager")
    lowered = lower_ranges(gm, context, report, eager=glue == "eager")

    if context.build:
        functions = _functions([one.graph for one in lowered], glue, context, report, recorder)
    else:
        functions = [graph_function(gm)] * len(lowered)
    layout = lowered[0].layout
    state = [spec.in_layout(layout) if layout else spec for spec in outcome.state]
    report.state = [str(spec) for spec in state]
    return assemble(gm, lowered, functions, state)


def _functions(
    graphs: Sequence[GraphModule],
    glue: str,
    context: Context,
    report: Report,
    recorder: Recorder | None,
) -> list[CompiledFunction]:
    """The functions of lowered graphs, which the recorder watches if there is one."""
    glues = [_glue_between_kernels(gm, glue, context, report) for gm in graphs]
    # The runtime compiles those of its steps.
    with compiling_kernels([] if context.paged else graphs, context.platform, report):
        if "inductor" in glues:
            load_inductor()
    functions = []
    for gm, glue_here in zip(graphs, glues, strict=True):
        with timed(report, "glue"):
            original = copy_graph(gm) if recorder else gm
            function = _glue(gm, glue_here, context, report)
            functions.append(recorder.wrap(original, function) if recorder else function)
    return functions


def _glue_between_kernels(gm: GraphModule, glue: str, context: Context, report: Report) -> str:
    """Eager instead of Inductor if the ops between the kernels of a lowered graph, which are
    moved together, are not worth the start of Inductor.
    """
    if glue == "eager":
        return glue
    sink_pointwise(gm.graph)
    why = why_eager(gm, context.platform) if context.options.glue == "auto" else None
    if why is not None:
        _note_glue(report, "eager", f"eager here: {why}")
        return "eager"
    return glue


def _glue(gm: GraphModule, glue: str, context: Context, report: Report) -> CompiledFunction:
    """A function that calls the kernels of a lowered graph and runs the ops between them."""
    if glue == "eager":
        return graph_function(gm)
    function, pieces = compile_glue(gm, inductor_patches(context.options))
    _note_glue(report, glue, pieces)
    note_attention_patterns(report, gm)
    return function


def note_attention_patterns(report: Report, gm: GraphModule) -> None:
    """Note that Inductor compiles a softmax without patterns of its own that are wrong."""
    if finds_wrong_attention(gm):
        report.notes.append(
            f"Inductor's attention patterns are off: those of torch {torch.__version__} ignore "
            "the dimension of softmax"
        )


def _note_glue(report: Report, glue: str, text: str) -> None:
    note = f"glue: {text}"
    report.notes.append(note)
    report.glue.append(Glue(glue, note))


def inductor_patches(options: Options) -> dict[str, JSONLike]:
    """Inductor's configuration for these options."""
    patches = {
        name: on for name, on in mode_options(options.mode).items() if "cudagraph" not in name
    }
    if options.rounding == "hf":
        patches["emulate_precision_casts"] = True
    return {**patches, **options.inductor}
