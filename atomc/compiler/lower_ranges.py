"""Lowers a graph once per range of token counts."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch.fx import GraphModule

from atomc import passes
from atomc.compiler import pipeline, ranges
from atomc.compiler.phases import timed
from atomc.compiler.select import Selection
from atomc.ops.op import Extra, Tokens
from atomc.report.report import Report
from atomc.rewriting.graph_pass import Context
from atomc.weights.prepared import unpreparable


@dataclass(frozen=True)
class Lowered:
    """A graph lowered for one range of token counts.

    layout   memory layout of the state, None without state
    extras   the inputs that lowering added
    read     the inputs that its nodes read
    syncing  kernels that cannot be captured in a CUDA graph
    """

    graph: GraphModule
    tokens: Tokens
    layout: str | None
    extras: list[Extra]
    read: set[str]
    syncing: list[str]


def lower_ranges(
    gm: GraphModule,
    context: Context,
    report: Report,
    observers: Sequence[pipeline.Observer],
    *,
    eager: bool,
) -> list[Lowered]:
    """The graph for each range of token counts in which the kernels differ; all have one layout of
    state.

    eager  the ops between kernels run eagerly
    """
    select = partial(
        Selection,
        context.options,
        context.platform,
        eager=eager,
        weights=_preparable(gm, context),
        copied={},
    )
    spans = ranges.ranges_of(gm, select().could_serve)
    layout = None
    lowered = []
    for span in spans:
        with timed(report, "lower"):
            graph = copy_graph(gm) if len(spans) > 1 else gm
            graph.meta["tokens"] = span
            selection = select(layout=layout, tokens=span)
            lowering = replace(context, choose=selection.choose, serves=selection.serves)
            pipeline.run(graph, [passes.ABSORB], lowering, report, observers)
            layout = layout or selection.fix_layout(list(graph.graph.nodes))
            done = pipeline.run(graph, [passes.LOWER], lowering, report, observers)
            report.kernels += selection.choices
            read = {node.name for node in graph.graph.find_nodes(op="placeholder") if node.users}
            lowered.append(Lowered(graph, span, layout, done.extras, read, selection.syncing))
    return lowered


def _preparable(gm: GraphModule, context: Context) -> dict[str, str | None]:
    """Input -> why a kernel may not keep a prepared copy of it, or None."""
    inputs = gm.graph.find_nodes(op="placeholder")
    weights = {
        node.name: unpreparable(given) for node, given in zip(inputs, context.inputs, strict=False)
    }
    return weights | {node.name: None for node in inputs if "packed" in node.meta}


def copy_graph(gm: GraphModule) -> GraphModule:
    """A copy of the graph, to be lowered for another range; values and metadata are shared."""
    graph = torch.fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    return GraphModule(gm, graph)
