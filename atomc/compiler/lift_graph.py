"""Lifts composite calls of Dynamo's graph and its regions."""

from collections.abc import Sequence
from dataclasses import replace

from torch.fx import GraphModule, Node

from atomc import passes
from atomc.capture.inline_regions import inline, path_in_layer, region, regions_of, stack_of
from atomc.compiler import pipeline
from atomc.compiler.phases import timed
from atomc.graph import structured_trace
from atomc.graph.provenance import layer_of
from atomc.report.report import Report
from atomc.rewriting.graph_pass import Context


def lift(dynamo: GraphModule, context: Context, report: Report) -> None:
    """Lift composite calls of Dynamo's graph, in place. A region is lifted once and reported for
    each of its calls.
    """
    chosen = context.options.passes.get(pipeline.LIFT, True)
    if chosen is False:
        return
    if chosen is not True:
        inline(dynamo)  # modules that are lifted differently cannot share a region
    with timed(report, "lift"):
        pipeline.run(dynamo, [passes.LIFT], context, report, structured_trace.observers())
        for name, calls in regions_of(dynamo).items():
            _lift_region(region(dynamo, name), calls, context, report)


def _lift_region(
    body: GraphModule, calls: Sequence[Node], context: Context, report: Report
) -> None:
    once = Report(report.model)
    lift(body, context, once)
    report.stages += once.stages
    for call in calls:
        report.matches += once.matches
        for site in once.sites:
            path = path_in_layer(site.module_path, stack_of(calls[0]), stack_of(call))
            report.sites.append(replace(site, module_path=path, layer=layer_of(path)))
