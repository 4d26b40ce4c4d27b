"""Traces a model with Dynamo and compiles it for the runtime, once and without guards."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from atomc.cache.compiled import Compiled
from atomc.cache.store import ProgramData
from atomc.capture.regions import region_failure_note, trace_once
from atomc.compiler.driver import build
from atomc.compiler.entry import new_report
from atomc.ops.inputs import ModelInputs
from atomc.options import Options
from atomc.platform import Platform
from atomc.report.report import Report, forget, keep
from atomc.rewriting.graph_pass import Context
from atomc.torch_compat.automatic_dynamic import isolated_dynamo_state
from atomc.torch_compat.core import GraphFunction, Input, Outputs
from atomc.torch_compat.tracing import (
    ShortenTraceback,
    mark_unbacked,
    raised_unwrapped,
    source_name,
    with_fresh_code,
)


class TracedModel(NamedTuple):
    """A compiled model.

    sources  the source expression of each input of Dynamo's graph
    inputs   for each input of Dynamo's graph the tensor of the model; None for an input of the step
    entry    the content of the cache entry of its graph, None if there is none
    key      the cache key of its graph, None if the cache was not used
    """

    compiled: Compiled
    sources: list[str | None]
    inputs: Sequence[Input]
    report: Report
    entry: ProgramData | None
    key: str | None


class _TraceFinished(ShortenTraceback):
    """Ends the call of a model that is only traced, before Dynamo creates guards, which are not
    needed.
    """

    def __init__(self, traced: TracedModel) -> None:
        super().__init__(first_useful_frame=None)
        self.traced = traced


def trace_model(
    model: nn.Module,
    options: Options,
    platform: Platform,
    observers: Sequence[Callable[[str, GraphModule], None]],
    keep_texts: bool,
    takes: ModelInputs,
    *,
    owned: bool,
) -> TracedModel:
    """Trace and compile the model; see atomc.program.compile_model."""
    device = next(model.parameters()).device
    context = Context(
        options,
        platform,
        paged=True,
        owned=owned,
        build=device.type != "meta",  # a model on meta is analysed, but not built
        observers=observers,
        keep_texts=keep_texts or options.report is not None,
    )
    reports: list[Report] = []  # of this trace, and of an earlier one that failed
    notes: list[str] = []

    def backend(gm: GraphModule, inputs: Sequence[Input]) -> GraphFunction:
        reports.append(keep(new_report(gm)))
        with raised_unwrapped():
            traced = _compiled(gm, replace(context, inputs=inputs), reports[-1])
        raise _TraceFinished(traced)

    def undo(why: Exception) -> None:
        notes.append(region_failure_note(why))
        while reports:
            forget(reports.pop())

    with torch.no_grad():
        example = _example_step(device, takes)
        start = time.perf_counter()
        made = trace_once(model, lambda: _run_dynamo(model, takes, example, backend), undo)
        total = time.perf_counter() - start
    made.report.notes += notes
    made.report.phases["dynamo"] = max(0.0, total - sum(made.report.phases.values()))
    return made


def _compiled(gm: GraphModule, context: Context, report: Report) -> TracedModel:
    """The model of a graph of Dynamo, whose inputs are those of the context."""
    built = build(gm, context.inputs, context, report, {})
    compiled = built.compiled
    sources = [source_name(node) for node in gm.graph.find_nodes(op="placeholder")]
    owned = [
        None if name in compiled.step_inputs else given
        for name, given in zip(compiled.inputs, context.inputs, strict=False)
    ]
    return TracedModel(compiled, sources, owned, report, built.entry, built.key)


def _example_step(device: torch.device, takes: ModelInputs) -> tuple[Tensor, ...]:
    """The arguments of the model in a step of 6 tokens; their sizes are traced as unbacked."""

    def rows(*size: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(size, dtype=dtype, device=device)

    tokens = rows(6, dtype=torch.int64)
    positions = torch.arange(6, device=device)
    if takes.mrope:
        positions = positions.expand(3, 6).contiguous()
    logits_rows = torch.arange(3, device=device)
    example = [tokens, positions]
    if takes.hidden is not None:
        example.append(rows(6, takes.hidden[0], dtype=takes.hidden[1]))
    example.append(logits_rows)
    if takes.embeddings is not None:
        width, dtype = takes.embeddings
        example += [rows(6, width, dtype=dtype), rows(6, dtype=torch.bool)]
    for tensor in example:
        mark_unbacked(tensor, int(tensor is positions and takes.mrope))
    return tuple(example)


def _run_dynamo(
    model: nn.Module,
    takes: ModelInputs,
    example: tuple[Tensor, ...],
    backend: Callable[[GraphModule, Sequence[Input]], GraphFunction],
) -> TracedModel:
    """GraphFunction the model under Dynamo until the backend raises _TraceFinished."""

    # The names of the arguments are those of atomc.ops.inputs.MODEL_INPUTS.
    def step(input_ids: Tensor, positions: Tensor, logits_rows: Tensor) -> Outputs:
        outputs: Outputs = model(input_ids, positions, logits_rows)
        return outputs

    def draft(input_ids: Tensor, positions: Tensor, hidden: Tensor, logits_rows: Tensor) -> Outputs:
        outputs: Outputs = model(input_ids, positions, hidden, logits_rows)
        return outputs

    def images(
        input_ids: Tensor,
        positions: Tensor,
        logits_rows: Tensor,
        embeddings: Tensor,
        is_image: Tensor,
    ) -> Outputs:
        outputs: Outputs = model(input_ids, positions, logits_rows, embeddings, is_image)
        return outputs

    assert takes.hidden is None or takes.embeddings is None, "no draft model reads images"
    call = with_fresh_code(draft if takes.hidden else images if takes.embeddings else step)
    try:
        with isolated_dynamo_state():
            torch.compile(call, backend=backend, fullgraph=True, dynamic=False)(*example)
    except _TraceFinished as done:
        return done.traced
    raise AssertionError("Dynamo found no graph in the model's forward")
