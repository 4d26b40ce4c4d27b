"""Lowers a graph once per range of token counts."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn
from torch.fx import GraphModule

from atomc import passes
from atomc.compiler import pipeline, ranges
from atomc.compiler.phases import timed
from atomc.compiler.select import Selection
from atomc.compiler.weight_forms import WeightForms
from atomc.graph.mutation import mutated, storage
from atomc.graph.node_record import record_of
from atomc.ops.op import Extra, Kernel, Refusal
from atomc.report.report import Report
from atomc.rewriting.graph_pass import Context, Pass
from atomc.token_range import Tokens
from atomc.weights.prepared import unpreparable
from atomc.weights.registry import is_freed, is_read, location_of


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
    gm: GraphModule, context: Context, report: Report, *, eager: bool
) -> list[Lowered]:
    """The graph for each range of token counts in which the kernels differ; all have one layout of
    state.

    eager  the ops between kernels run eagerly
    """
    with timed(report, "lower"):
        selected = _selected(gm, context, report, eager=eager)
    lowered = []
    for graph, selection in selected:
        with timed(report, "lower"):
            lowering = _lowering(context, selection)
            done = pipeline.run(graph, [passes.LOWER], lowering, report)
            report.kernels += selection.choices
            read = {node.name for node in graph.graph.find_nodes(op="placeholder") if node.users}
            span, layout = selection.tokens, selection.layout
            lowered.append(Lowered(graph, span, layout, done.extras, read, selection.syncing))
    return lowered


def _selected(
    gm: GraphModule, context: Context, report: Report, *, eager: bool
) -> list[tuple[GraphModule, Selection]]:
    """The graph of each range of token counts and what chooses its kernels, with the layout of the
    state and the forms of weights that all have in common.
    """
    forms = _forms(gm, context)
    weights = _preparable(gm, context)
    unfit: dict[tuple[Kernel, str], Refusal | None] = {}
    select = partial(
        Selection,
        context.options,
        context.platform,
        eager=eager,
        weights=weights,
        forms=forms,
        common={node.name for node in gm.graph.nodes},
    )
    spans = ranges.ranges_of(gm, select(unfit=unfit).could_serve)
    selected: list[tuple[GraphModule, Selection]] = []
    layout, shown = None, report
    for span in spans:
        graph = copy_graph(gm) if len(spans) > 1 else gm
        graph.meta["tokens"] = span
        # Of its own: names of nodes that passes try stand for others in the graph of another range.
        selection = select(layout=layout, tokens=span, unfit=dict(unfit))
        lowering = _lowering(context, selection)
        # In each of these ranges the same fires, and the report has it once.
        switched_on = _switched_on(context, (passes.INDEX_QUERIES, passes.LINEAR_GATED))
        fused = pipeline.run(graph, switched_on, lowering, shown).fired
        absorbed = pipeline.run(graph, [passes.SELECT_MLA_FORM], lowering, report).fired
        if fused or absorbed:
            selection.unfit = {}  # this graph differs from those of other ranges
            made_possible = _switched_on(context, passes.AFTER_MLA_FORM if absorbed else ())
            pipeline.run(graph, made_possible, lowering, shown)
            shown = Report(report.model)
        layout = layout or selection.fix_layout(list(graph.graph.nodes))
        selected.append((graph, selection))
    forms.settle(selected)
    return selected


def _lowering(context: Context, selection: Selection) -> Context:
    return replace(context, choose=selection.choose, first=selection.first)


def _switched_on(context: Context, among: Sequence[Pass]) -> list[Pass]:
    """The passes without those that options turn off."""
    return [p for p in among if context.options.passes.get(p.name) is not False]


def _forms(gm: GraphModule, context: Context) -> WeightForms:
    """The forms in which earlier programs of the runtime hold weights; no others are chosen yet."""
    inputs = gm.graph.find_nodes(op="placeholder")
    parameters = {
        node.name: parameter
        for node, parameter in zip(inputs, context.inputs, strict=False)
        if isinstance(parameter, nn.Parameter)
    }
    for node in inputs:
        if (packed := record_of(node).packed) and packed.parts[0] in parameters:
            parameters[node.name] = parameters[packed.parts[0]]
    return WeightForms(
        context.platform,
        owned=context.owned,
        earlier={
            name: tuple(weight.prepare for weight in location_of(parameter).prepared.values())
            for name, parameter in parameters.items()
            if is_freed(parameter)
        },
        stored=[name for name, parameter in parameters.items() if is_read(parameter)],
    )


def _preparable(gm: GraphModule, context: Context) -> dict[str, str | None]:
    """Input -> why a kernel may not keep a prepared copy of it, or None."""
    inputs = gm.graph.find_nodes(op="placeholder")
    weights = {
        node.name: unpreparable(argument)
        for node, argument in zip(inputs, context.inputs, strict=False)
    }
    written = {storage(target).name for node in gm.graph.nodes for target in mutated(node)}
    weights |= dict.fromkeys(written, "the graph writes it in each call")
    return weights | {node.name: None for node in inputs if record_of(node).packed}


def copy_graph(gm: GraphModule) -> GraphModule:
    """A copy of the graph, to be lowered for another range; values and metadata are shared."""
    graph = torch.fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    return GraphModule(gm, graph)
