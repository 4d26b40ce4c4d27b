"""A model traced by Dynamo and compiled for the runtime: once, without guards."""

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from atomc.backend import new_report
from atomc.cache.compiled import Compiled
from atomc.cache.graph_start import GraphStart
from atomc.cache.store import Plain
from atomc.capture.functional import trace
from atomc.capture.regions import every_layer, trace_once
from atomc.dumps.dump import Dumper
from atomc.graph_pass import Context
from atomc.options import Options
from atomc.platform import Platform
from atomc.report import Report, forget, keep
from atomc.stages import lift_stage, stages
from atomc.torch_compat.automatic_dynamic import compiled_alone
from atomc.torch_compat.tracing import ShortenTraceback, added_by_aot, afresh, mark_unbacked, passed_on, source_name


class Traced(NamedTuple):
    """A compiled model; of each input of its graph the source, as Dynamo spells it, and the value while tracing.

    entry  what the cache holds of its graph now, None if nothing
    key    what the cache calls its graph, None where it was not asked
    """

    compiled: Compiled
    sources: list[str | None]
    inputs: list[Any]
    report: Report
    entry: Plain | None
    key: str | None


class _Done(ShortenTraceback):
    """Ends the call of a model that is only to be traced, before Dynamo makes guards that nobody will check."""

    def __init__(self) -> None:
        super().__init__(first_useful_frame=None)


def traced(
    model: nn.Module, options: Options, platform: Platform, observers: Sequence[Callable[[str, GraphModule], None]],
    keep_texts: bool,
) -> Traced:  # fmt: skip
    """The model, traced and compiled; see atomc.program.compile_model."""
    device = next(model.parameters()).device
    made: list[Traced] = []
    reports: list[Report] = []

    def backend(gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        reports.append(keep(new_report(gm)))
        context = Context(options, platform, paged=True, notes=reports[-1].notes, inputs=inputs, observers=observers,
                          keep_texts=keep_texts or options.report is not None)  # fmt: skip
        with passed_on():
            made.append(_compiled(gm, inputs, context, reports[-1], glue=device.type != "meta"))
        raise _Done

    def step(input_ids: Tensor, positions: Tensor, logits_rows: Tensor) -> Tensor:
        logits: Tensor = model(input_ids, positions, logits_rows)
        return logits

    def dynamo() -> None:
        with contextlib.suppress(_Done), compiled_alone():
            torch.compile(afresh(step), backend=backend, fullgraph=True, dynamic=False)(*example)

    notes: list[str] = []

    def undo(why: Exception) -> None:
        notes.append(every_layer(why))
        while reports:
            forget(reports.pop())

    with torch.no_grad():
        example = (torch.zeros(6, dtype=torch.int64, device=device), torch.arange(6, device=device),
                   torch.arange(3, device=device))  # fmt: skip
        for tensor in example:
            mark_unbacked(tensor, 0)
        start = time.perf_counter()
        trace_once(model, dynamo, undo)
        total = time.perf_counter() - start
    report = made[-1].report
    report.notes += notes
    report.phases["dynamo"] = max(0.0, total - sum(report.phases.values()))
    return made[-1]


def _compiled(gm: GraphModule, inputs: Sequence[Any], context: Context, report: Report, *, glue: bool) -> Traced:
    """All stages for Dynamo's graph. A model on meta is only looked at: nothing is built for it, `glue` is False."""
    before = GraphStart(gm, inputs, context, report, {})
    made: list[Compiled] = []

    def compiler(functional: GraphModule, fakes: Sequence[Any]) -> Callable[..., Any]:
        around = added_by_aot(functional, len(inputs))
        made.append(stages(functional, context, report, Dumper(context.options.dump), glue=glue))
        before.keep(made[-1], [], around)
        return made[-1].call

    found = before.found()
    if found is not None:
        made.append(found[0])
    else:
        start = time.perf_counter()
        trace(gm, inputs, lambda dynamo: lift_stage(dynamo, context, report), compiler, {}, report.notes)
        report.phases["trace"] = time.perf_counter() - start - sum(report.phases.values())
    sources = [source_name(node) for node in gm.graph.find_nodes(op="placeholder")]
    return Traced(made[-1], sources, list(inputs), report, before.entry, before.key)
