"""The backend of torch.compile(model, backend="atom"): takes a graph, returns a callable.

    lift > trace (AOTAutograd) > passes > lower, per range of token counts > glue
"""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from atomc import contract
from atomc.capture.functional import wants_gradients
from atomc.driver import inductor_patches, timed
from atomc.errors import OURS, OptionsError, RunError
from atomc.graph.provenance import clean_path
from atomc.options import Options
from atomc.platform import Platform
from atomc.render.page import publish
from atomc.report import Report, forget, keep
from atomc.report_records import GraphBreak
from atomc.specialize import Specialized, runnable
from atomc.torch_compat.inductor import inductor, inductor_option_names
from atomc.torch_compat.tracing import (
    RestartAnalysis,
    ShortenTraceback,
    break_reason,
    compiled_function,
    raised_unwrapped,
    recompile_reason,
)

log = logging.getLogger("atomc")


def atom(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | Options | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """The backend. Raises OptionsError for wrong options; after any other failure, Inductor compiles the graph."""
    with raised_unwrapped():
        chosen = Options.of(options, mode)
        _check_inductor_options(chosen)
        contract.check_formulas(chosen.expect)
        return compile_graph(gm, example_inputs, chosen)


def compile_graph(
    gm: GraphModule, example_inputs: Sequence[Any], options: Options, platform: Platform | None = None
) -> Callable[..., Any]:
    """Compile one graph from Dynamo; or let Inductor compile it, and report why."""
    report = keep(new_report(gm))
    reason = skip_reason(example_inputs, options)
    if reason:
        return to_inductor(gm, example_inputs, options, report, reason)
    if any(isinstance(x, Tensor) and x.is_meta for x in example_inputs):
        raise RunError("the model is on the meta device and cannot run: load its weights, or use atomc.explain(model, ...)")
    try:
        made = Specialized(gm, example_inputs, options, platform, report).first()
        publish(report, options)
        return made
    except RestartAnalysis:  # Dynamo traces again with floats it now knows to be constants
        forget(report)
        raise
    except (ShortenTraceback, *OURS):
        raise
    except Exception as error:  # a failure of the compiler must not fail the program
        report.treated, report.why_not = False, f"{type(error).__name__}: {error}"
        if options.strict:
            publish(report, options)
            raise
        log.warning("atomc could not compile a graph of %s, Inductor compiles it: %s", report.model, error)
        return to_inductor(gm, example_inputs, options, report, report.why_not)


def new_report(gm: GraphModule) -> Report:
    """A report with the model, the graph break after the graph, and the guard that caused the recompile."""
    report = Report(model_name(gm))
    broken = break_reason(gm)
    if broken is not None:
        reason, stack = broken
        file, line, code = stack[-1] if stack else ("", 0, "")
        report.graph_break = GraphBreak(f"{file.rsplit('/', 1)[-1]}:{line}", code.strip(), reason.split("\n")[0].strip())
    report.recompile = recompile_reason()
    return report


def model_name(gm: GraphModule) -> str:
    """The class whose forward Dynamo compiles, else the outermost module in the graph."""
    owner, _, name = compiled_function().rpartition(".")
    if name == "forward" and "<locals>" not in owner.rpartition(".")[2]:
        return owner.rpartition(".")[2]
    for node in gm.graph.nodes:
        stack = node.meta.get("nn_module_stack")
        if stack:
            path, kind = next(iter(stack.values()))
            name = kind if isinstance(kind, str) else kind.__qualname__
            return name.rsplit(".", 1)[-1] or clean_path(path)
    return "function"


def skip_reason(example_inputs: Sequence[Any], options: Options) -> str | None:
    """Why Inductor compiles this graph without an attempt of atomc; None if atomc compiles it."""
    if options.disable:
        return "atomc is disabled (ATOMC_DISABLE=1 or options={'disable': True})"
    if torch.is_grad_enabled() and wants_gradients(example_inputs):
        _warn_about_training()
        return ("gradients are enabled and a parameter or input requires them: this is a training graph; "
                "run under torch.inference_mode() or call model.requires_grad_(False)")  # fmt: skip
    return None


_warned = threading.Event()


def _warn_about_training() -> None:
    if not _warned.is_set():
        _warned.set()
        log.warning("atomc compiles for inference only: this graph requires gradients, Inductor compiles it. "
                    "Run it under torch.inference_mode(), or call model.requires_grad_(False).")  # fmt: skip


def to_inductor(
    gm: GraphModule, example_inputs: Sequence[Any], options: Options, report: Report, reason: str
) -> Callable[..., Any]:
    """Compile Dynamo's graph with Inductor, as its own backend does."""
    report.treated, report.why_not = False, reason
    contract.check(report, options)
    gm = runnable(gm)
    with timed(report, "inductor"):
        made = inductor(gm, example_inputs, inductor_patches(options))
    publish(report, options)
    return made


def _check_inductor_options(options: Options) -> None:
    if options.inductor:
        known = set(inductor_option_names())
        unknown = sorted(name for name in options.inductor if name.replace("-", "_") not in known)
        if unknown:
            raise OptionsError(f"option inductor: Inductor has no option {unknown[0]!r}; torch._inductor.list_options() "
                               "lists its options")  # fmt: skip


