"""What each way into the compiler does first with a graph from Dynamo: a report, and whether atomc
compiles it.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch.fx import GraphModule

from atomc.capture import regions
from atomc.capture.functional import wants_gradients
from atomc.capture.subclasses import subclass_reason
from atomc.graph.provenance import clean_path, use_tree_names
from atomc.options import Options
from atomc.report.records import GraphBreak
from atomc.report.report import Report, forget
from atomc.tested_versions import warn_of_untested
from atomc.torch_compat.core import Outputs
from atomc.torch_compat.module_tree import module_names
from atomc.torch_compat.tracing import (
    break_reason,
    compiled_function,
    continued_line,
    number_of_call,
    recompile_reason,
    runs_in_grad_mode,
)

log = logging.getLogger("atomc")
T = TypeVar("T")
_LOOP_OVER_EXPERTS = (
    "a loop over the experts that tokens chose depends on data, and each of its parts is compiled "
    'alone; call model.set_experts_implementation("grouped_mm") before torch.compile'
)


def new_report(gm: GraphModule) -> Report:
    """A report with the model, the graph break after the graph and that before it, and the guard
    that caused the recompile. Module paths of the graph become those of the module tree.
    """
    warn_of_untested()
    names = module_names()
    use_tree_names(gm, names)
    report = Report(model_name(gm), continues=continued_line(), call=number_of_call())
    report.notes += regions.notes_of(names)
    broken = break_reason(gm)
    if broken is not None:
        reason, stack = broken
        file, line, code = stack[-1] if stack else ("", 0, "")
        summary, *rest = reason.strip().split("\n")
        if "/transformers/models/" in file and "expert" in code:
            summary += f": {_LOOP_OVER_EXPERTS}"
        source = f"{file.rsplit('/', 1)[-1]}:{line}"
        report.graph_break = GraphBreak(source, code.strip(), "\n".join([summary, *rest]))
    report.recompile = recompile_reason()
    return report


def trace_reported(model: Callable[..., Outputs], run: Callable[[], T], reports: list[Report]) -> T:
    """Call `run`, which traces the model and fills `reports`, with repeated layers of the model as
    regions. If it fails for them, it starts again without, and the first report has the reason.
    """
    notes: list[str] = []

    def undo(why: Exception) -> None:
        notes.append(regions.region_failure_note(why))
        while reports:
            forget(reports.pop())

    traced = regions.trace_once(model, run, undo)
    for report in reports[:1]:
        report.notes += notes
    return traced


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


def skip_reason(gm: GraphModule, example_inputs: Sequence[Any], options: Options) -> str | None:
    """Why Inductor compiles this graph without an attempt of atomc; None if atomc compiles it."""
    if options.disable:
        return "atomc is disabled (ATOMC_DISABLE=1 or options={'disable': True})"
    if wants_gradients(example_inputs) and runs_in_grad_mode(gm.graph):
        _warn_about_training()
        return (
            "gradients are enabled and a parameter or input requires them: this is a training "
            "graph; "
            "run under torch.inference_mode() or call model.requires_grad_(False)"
        )
    return subclass_reason(gm, example_inputs)


_warned = threading.Event()


def _warn_about_training() -> None:
    if not _warned.is_set():
        _warned.set()
        log.warning(
            "atomc compiles for inference only: this graph requires gradients, Inductor "
            "compiles it. "
            "Run it under torch.inference_mode(), or call model.requires_grad_(False)."
        )
