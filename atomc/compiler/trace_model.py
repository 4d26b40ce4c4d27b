"""Traces a model with Dynamo and compiles it for the runtime, once and without guards."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from atomc.cache.model_cache import CompiledModel
from atomc.capture.subclasses import check_weights
from atomc.compiler.driver import build
from atomc.compiler.entry import new_report, trace_reported
from atomc.compiler.pipeline import PassError
from atomc.errors import OURS
from atomc.ops.inputs import ModelInputs
from atomc.options import Options
from atomc.platform import Platform
from atomc.report.report import Report, keep
from atomc.rewriting.graph_pass import Context
from atomc.torch_compat.automatic_dynamic import isolated_dynamo_state
from atomc.torch_compat.core import GraphFunction, Input, Outputs
from atomc.torch_compat.exceptions import out_of_memory
from atomc.torch_compat.trace_failure import raised_by_backend, trace_failure
from atomc.torch_compat.tracing import (
    ShortenTraceback,
    TracingError,
    argument_of,
    mark_unbacked,
    raised_unwrapped,
    source_name,
    with_fresh_code,
)

log = logging.getLogger("atomc")


class _TraceFinished(ShortenTraceback):
    """Ends the call of a model that is only traced, before Dynamo creates guards, which are not
    needed.
    """

    def __init__(self, traced: CompiledModel) -> None:
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
) -> CompiledModel:
    """Trace and compile the model; see atomc.program.compile_model."""
    device = next(model.parameters()).device
    context = Context(
        options,
        platform,
        paged=True,
        lora=takes.lora,
        owned=owned,
        build=device.type != "meta",  # a model on meta is analysed, but not built
        observers=observers,
        keep_texts=keep_texts or options.report is not None,
    )

    example = _example_step(device, takes)
    # Of positions [3, T], the number of axes is the same in each step.
    dims = [int(i == 1 and takes.mrope) for i in range(len(example))]
    return trace(model, _call_of(model, takes), example, context, dims=dims)


def _call_of(model: nn.Module, takes: ModelInputs) -> Callable[..., Outputs]:
    """The model as a function whose arguments have the names of atomc.ops.inputs.MODEL_INPUTS, by
    which a traced graph refers to them.
    """

    if takes.hidden and takes.embeddings:
        return lambda input_ids, positions, hidden, logits_rows, embeddings, is_image: model(
            input_ids, positions, hidden, logits_rows, embeddings, is_image
        )
    if takes.hidden:
        return lambda input_ids, positions, hidden, logits_rows: model(
            input_ids, positions, hidden, logits_rows
        )
    if takes.embeddings:
        return lambda input_ids, positions, logits_rows, embeddings, is_image: model(
            input_ids, positions, logits_rows, embeddings, is_image
        )
    return lambda input_ids, positions, logits_rows: model(input_ids, positions, logits_rows)


def trace(
    model: nn.Module,
    call: Callable[..., Outputs],
    example: Sequence[Tensor],
    context: Context,
    *,
    dims: Sequence[int] | None = None,
) -> CompiledModel:
    """Trace and compile `call`, a function of tensors that calls the model.

    dims   for each tensor, the dimension whose size is traced as unbacked; None: the first

    Raises ValueError for a model with tensor subclasses, and with the reason and the line for one
    that cannot be served. Strict options add the traceback, else it is logged at level debug.
    """
    check_weights(model)
    for tensor, dim in zip(example, dims or [0] * len(example), strict=True):
        mark_unbacked(tensor, dim)
    reports: list[Report] = []  # of this trace, and of an earlier one that failed

    def backend(gm: GraphModule, inputs: Sequence[Input]) -> GraphFunction:
        reports.append(keep(new_report(gm)))
        with raised_unwrapped():
            traced = _compiled(gm, replace(context, inputs=inputs), reports[-1])
        raise _TraceFinished(traced)

    with torch.no_grad():
        start = time.perf_counter()
        try:
            compiled = trace_reported(model, lambda: _run_dynamo(call, example, backend), reports)
        except OURS:
            raise
        except TracingError as error:
            raise serving_error(model, error) from (error if context.options.strict else None)
        total = time.perf_counter() - start
    compiled.report.phases["dynamo"] = max(0.0, total - sum(compiled.report.phases.values()))
    return compiled


def serving_error(model: nn.Module, error: BaseException) -> BaseException:
    """What to raise instead of an error of Dynamo's: ValueError with the reason, or the cause of
    the error if memory ran out. The log has the trace, at level debug.
    """
    cause = raised_by_backend(error)
    if isinstance(cause, MemoryError) or out_of_memory(cause):
        return cause
    inner = getattr(model, "hf_model", model)
    name = type(inner).__name__
    log.debug("%s was not compiled", name, exc_info=error)
    if isinstance(cause, PassError) and isinstance(cause.__cause__, ValueError):
        reason, where, only_here = str(cause.__cause__), "", True
    else:
        reason, where, only_here = trace_failure(cause)
    # True of transformers' classes, whose own attention is back there.
    elsewhere = only_here and inner is not model
    return ValueError(
        f"{name} cannot be served: {reason}"
        + f" ({where})" * bool(where)
        + '; torch.compile(model, backend="atom") in a program of your own has no such limit'
        * elsewhere
    )


def _compiled(gm: GraphModule, context: Context, report: Report) -> CompiledModel:
    """The model of a graph of Dynamo, whose inputs are those of the context."""
    built = build(gm, context, report, {})
    placeholders = gm.graph.find_nodes(op="placeholder")
    sources = [source_name(node) for node in placeholders]
    arguments = [argument_of(node) for node in placeholders]
    owned = [
        tensor if argument is None else None
        for argument, tensor in zip(arguments, context.inputs, strict=True)
    ]
    return CompiledModel(built.compiled, owned, arguments, report, built.key, sources, built.entry)


def _example_step(device: torch.device, takes: ModelInputs) -> Sequence[Tensor]:
    """The arguments of the model in a step of 6 tokens."""

    def rows(*size: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(size, dtype=dtype, device=device)

    positions = torch.arange(6, device=device)
    example = [rows(6, dtype=torch.int64), positions.repeat(3, 1) if takes.mrope else positions]
    if takes.hidden is not None:
        width, dtype = takes.hidden
        example.append(rows(6, width, dtype=dtype))
    example.append(torch.arange(3, device=device))
    if takes.embeddings is not None:
        width, dtype = takes.embeddings
        example += [rows(6, width, dtype=dtype), rows(6, dtype=torch.bool)]
    return example


def _run_dynamo(
    call: Callable[..., Outputs],
    example: Sequence[Tensor],
    backend: Callable[[GraphModule, Sequence[Input]], GraphFunction],
) -> CompiledModel:
    """Run the call under Dynamo until the backend raises _TraceFinished."""
    fresh = with_fresh_code(call)
    try:
        with isolated_dynamo_state():
            torch.compile(fresh, backend=backend, fullgraph=True, dynamic=False)(*example)
    except _TraceFinished as done:
        return done.traced
    raise AssertionError("Dynamo found no graph in the model's forward")
