"""The backend of torch.compile(model, backend="atom"): compiles a graph of Dynamo to a callable."""

import logging
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.fx import GraphModule

from atomc.capture.dtensors import localize
from atomc.capture.functional import wants_gradients
from atomc.compiler.callable_of import callable_of, runnable
from atomc.compiler.driver import inductor_patches, note_attention_patterns
from atomc.compiler.entry import new_report, skip_reason
from atomc.compiler.phases import timed
from atomc.errors import OURS, OptionsError, RunError
from atomc.files.json_types import JSONMapping
from atomc.options import Options
from atomc.platform import Platform
from atomc.report import contract
from atomc.report.page_file import publish
from atomc.report.report import Report, forget, keep
from atomc.torch_compat.core import GraphFunction, Input
from atomc.torch_compat.inductor import inductor, inductor_option_names
from atomc.torch_compat.symbolic_flags import decide_symbolic_flags
from atomc.torch_compat.tracing import (
    RestartAnalysis,
    ShortenTraceback,
    raised_unwrapped,
)

log = logging.getLogger("atomc")
# torch.compile(backend="atom") imports this module, and nothing else of atomc before it traces.
decide_symbolic_flags()


def atom(
    gm: GraphModule,
    example_inputs: Sequence[Input],
    *,
    options: JSONMapping | Options | None = None,
    mode: str | None = None,
) -> GraphFunction:
    """The backend. Raises OptionsError for wrong options; after any other failure, Inductor
    compiles the graph.
    """
    with raised_unwrapped():
        parsed = Options.of(options, mode)
        _check_inductor_options(parsed)
        contract.check_formulas(parsed.expect)
        return compile_graph(gm, example_inputs, parsed)


def compile_graph(
    gm: GraphModule,
    example_inputs: Sequence[Input],
    options: Options,
    platform: Platform | None = None,
) -> GraphFunction:
    """Compile one graph from Dynamo; or let Inductor compile it, and report why."""
    report = keep(new_report(gm))
    reason = skip_reason(gm, example_inputs, options)
    if reason:
        return compile_with_inductor(gm, example_inputs, options, report, reason)
    if any(isinstance(x, Tensor) and x.is_meta for x in example_inputs):
        raise RunError(
            "the model is on the meta device and cannot run: load its weights, or use "
            "atomc.explain(model, ...)"
        )
    try:
        local = localize(gm, example_inputs)
        compiled = callable_of(local.graph, local.inputs, options, platform, report)
        if torch.is_grad_enabled() and wants_gradients(example_inputs):
            compiled = torch.no_grad()(
                compiled
            )  # its calls are in no_grad or inference_mode, in the graph
        publish(report, options)
        return local.wrap(compiled)
    except RestartAnalysis:  # Dynamo traces again with these floats as constants
        forget(report)
        raise
    except (ShortenTraceback, *OURS):
        raise
    except Exception as error:  # a failure of the compiler must not fail the program
        report.treated, report.why_not = False, f"{type(error).__name__}: {error}"
        if options.strict:
            publish(report, options)
            raise
        log.warning(
            "atomc could not compile a graph of %s, Inductor compiles it: %s", report.model, error
        )
        return compile_with_inductor(gm, example_inputs, options, report, report.why_not)


def compile_with_inductor(
    gm: GraphModule, example_inputs: Sequence[Input], options: Options, report: Report, reason: str
) -> GraphFunction:
    """Compile Dynamo's graph with Inductor, as its own backend does."""
    report.treated, report.why_not = False, reason
    contract.check(report, options)
    gm = runnable(gm, example_inputs)
    note_attention_patterns(report, gm)
    with timed(report, "inductor"):
        compiled = inductor(gm, example_inputs, inductor_patches(options))
    publish(report, options)
    return compiled


def _check_inductor_options(options: Options) -> None:
    if options.inductor:
        names = set(inductor_option_names())
        unknown = sorted(name for name in options.inductor if name.replace("-", "_") not in names)
        if unknown:
            raise OptionsError(
                f"option inductor: Inductor has no option {unknown[0]!r}; "
                "torch._inductor.list_options() "
                "lists its options"
            )
