"""The stages of one graph: passes, lowering per range of token counts, glue; and what a caller appends to each call."""

import copy
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from atomc import cost, passes, pipeline, ranges, trace
from atomc.audit.watch import Watch
from atomc.cache.artifact import Plain, reference
from atomc.cache.compiled import Compiled, assembled
from atomc.cache.generated import Function, of_graph
from atomc.capture.stamp import inline, region, regions_of, renamed, stack_of
from atomc.copies import unfit
from atomc.dumps.dump import Dumper
from atomc.few_bits import few_bits
from atomc.graph.provenance import layer_of
from atomc.graph_pass import Context
from atomc.named_ranges import profiled
from atomc.op import Extra
from atomc.options import Options
from atomc.pieces import FEW_OPS, compile_glue, glue_of, left_for_glue
from atomc.report import Glue, OpCost, Report
from atomc.savings import savings
from atomc.select import Selection
from atomc.torch_compat.inductor import mode_options


@contextmanager
def timed(report: Report, phase: str) -> Iterator[None]:
    start = time.perf_counter()
    try:
        yield
    finally:
        report.phases[phase] = report.phases.get(phase, 0.0) + time.perf_counter() - start


def inductor_patches(options: Options) -> dict[str, Any]:
    """Inductor's configuration for these options."""
    patches = {name: on for name, on in mode_options(options.mode).items() if "cudagraph" not in name}
    if options.rounding == "hf":
        patches["emulate_precision_casts"] = True
    return {**patches, **options.inductor}


def lift_stage(dynamo: GraphModule, context: Context, report: Report) -> None:
    """Lift composite calls of Dynamo's graph, in place: of a region once, in the report for each of its calls."""
    chosen = context.options.passes.get(pipeline.LIFT, True)
    if chosen is False:
        return
    if chosen is not True:
        inline(dynamo)  # layers that are lifted differently are no calls of one region
    with timed(report, "lift"):
        pipeline.run(dynamo, [passes.LIFT], context, report, trace.observers())
        for name, calls in regions_of(dynamo).items():
            once = Report(report.model)
            lift_stage(region(dynamo, name), context, once)
            report.stages += once.stages
            for call in calls:
                report.matches += once.matches
                for site in once.sites:
                    path = renamed(site.module_path, stack_of(calls[0]), stack_of(call))
                    report.sites.append(replace(site, module_path=path, layer=layer_of(path)))


def stages(
    gm: GraphModule, context: Context, report: Report, dumper: Dumper, *, glue: bool = True
) -> Compiled:
    """Passes, lowering per range, and glue for a functional graph. Without glue, `call` is the original's forward."""
    chosen, report.off = pipeline.selected(passes.PIPELINE, context)
    looked_at = glue and (context.options.audit or context.options.record)
    watch = Watch(gm, context.options, report, dumper) if looked_at else None
    with timed(report, "passes"):
        observers = [lambda name, graph: dumper(graph, name), *trace.observers(), *context.observers]
        for observer in observers:
            observer("captured", gm)
        pipeline.run(gm, chosen, context, report, observers)
        where = context.platform
        said = ("name", "arch", "device", "bandwidth", "flops")
        report.machine = {name: getattr(where, name) for name in said}
        costs = cost.graph_costs(gm)
        report.costs, report.few_bits = [_op_cost(c) for c in costs], few_bits(gm)
    if watch:
        watch.passes_done()
    inputs = gm.graph.find_nodes(op="placeholder")
    packed = {node.name: node.meta["packed"] for node in inputs if "packed" in node.meta}
    names = [node.name for node in inputs]
    weights = {name: unfit(given) for name, given in zip(names, context.inputs, strict=False)} | dict.fromkeys(packed)
    how, why = glue_of(context.options, context.platform)
    _note_glue(report, how, f"{how} ({why})")
    if context.keep_texts:
        report.savings = savings(gm, costs, report.near, glue_fuses=how != "eager")
    functions: list[Function] = []
    layout = None
    selection = Selection(context.options, context.platform, eager=how == "eager", weights=weights)  # loads the kernels
    found = ranges.ranges_of(gm, selection.could_serve)
    extras: list[Extra] = []
    extras_of: list[tuple[int, int, int]] = []
    syncing: list[str] = []
    copied: dict[tuple[str, Any], int] = {}
    for span in found:
        with timed(report, "lower"):
            lowered = copy_graph(gm) if len(found) > 1 else gm
            selection = Selection(context.options, context.platform, eager=how == "eager", layout=layout,
                                  tokens=span, weights=weights, copied=copied)  # fmt: skip
            layout = layout or selection.fix_layout(list(lowered.graph.nodes))
            for_range = copy.copy(context)
            for_range.choose, for_range.extras = selection.choose, []
            lowered.meta["tokens"] = span
            pipeline.run(lowered, [passes.LOWER], for_range, report, observers)
            report.kernels += selection.choices
            syncing += selection.syncing
        with timed(report, "glue"):
            seen = copy_graph(lowered) if watch else lowered
            made = _glue(lowered, how, context.options, report) if glue else of_graph(gm)
            functions.append(watch.over(seen, made) if watch else made)
            offset = len(lowered.graph.find_nodes(op="placeholder")) - len(for_range.extras)
            extras_of.append((offset, len(extras), len(for_range.extras)))
            extras += for_range.extras
    state = [replace(spec, layout=layout or spec.layout) for spec in context.state]
    report.state = [f"{spec.name}: {spec.kind} {list(spec.shape)} {spec.dtype} layout {spec.layout}" for spec in state]
    chosen_by, device = ranges.dispatch(gm, found), _device(gm)
    call = profiled(
        assembled([function.call for function in functions], extras_of, chosen_by, device),
        lambda: assembled([function.named() for function in functions], extras_of, chosen_by, device),
    )

    def plain() -> Plain:
        return {
            "inputs": names, "packed": packed, "state": [asdict(spec) for spec in state], "syncing": syncing,
            "extras": [{**vars(extra), "function": reference(extra.function)} for extra in extras],
            "functions": [function.plain() for function in functions], "extras_of": extras_of,
            "dispatch": asdict(chosen_by) if chosen_by else None, "device": device,
        }  # fmt: skip

    return Compiled(call, names, packed, state, extras, syncing, plain)


def _op_cost(found: cost.NodeCost) -> OpCost:
    nodes = [node.name for node in found.nodes]
    made_of = sorted(set[str]().union(*(node.meta.get("origins", {node.name}) for node in found.nodes)))
    apart = str(found.apart) if found.apart != found.cost.bytes else ""
    return OpCost(found.op, found.module_path, found.layer, found.source, str(found.cost.bytes), str(found.cost.flops),
                  nodes, made_of, apart, str(found.nodes[-1].meta.get("made_by", "")))  # fmt: skip


def _device(gm: GraphModule) -> str | None:
    """The GPU that the graph's tensors lie on."""
    values = [node.meta.get("val") for node in gm.graph.find_nodes(op="placeholder")]
    return next((str(x.device) for x in values if isinstance(x, Tensor) and x.device.type == "cuda"), None)


def _glue(gm: GraphModule, how: str, options: Options, report: Report) -> Function:
    if how == "eager":
        return of_graph(gm)
    if options.glue == "auto" and (count := left_for_glue(gm)) <= FEW_OPS:
        _note_glue(report, "eager", f"eager here: {count} ops stand between kernels, not worth starting Inductor")
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
