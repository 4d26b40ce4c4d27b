"""Records a compile, and audits or records the first call of the compiled function.

`options={"audit": True}`: the first call is audited, its result is unchanged; the findings are
stored in `report.audit` and logged once. `options={"dump": DIR, "record": True}`: its inputs and
outputs are stored in the folder of the dump.
"""

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import Argument
from tqdm import tqdm

from atomc.audit.bisect import bisect_rewrites, disabling_option
from atomc.audit.compare_kernels import KernelComparison, SiteErrors
from atomc.audit.error import worst
from atomc.audit.evaluate import flatten, placeholders, step_tensors
from atomc.audit.node_correspondence import NodeCorrespondence
from atomc.audit.sites import AuditSite, audit_sites, rewrite_order
from atomc.cache.generated import CompiledFunction
from atomc.dumps.dump import Dumper
from atomc.ops.inputs import StepInput
from atomc.options import Options
from atomc.report.audit_findings import AuditFindings, Blame, SiteRow
from atomc.report.render.audit import headline
from atomc.report.report import Report
from atomc.torch_compat.core import GraphFunction, Input, Outputs, outside_of_tracing

log = logging.getLogger("atomc")
T = TypeVar("T")

# Relative to the largest output: the error that another order of fp32 additions may cause.
MIN_BOUND = 1e-4
# The error of the compiled program may be this many times that of the original program.
BOUND_FACTOR = 2.0


class Recorder:
    """Records one compile from the captured graph on, and wraps the function of each range of token
    counts.
    """

    def __init__(self, gm: GraphModule, options: Options, report: Report, dumper: Dumper):
        self.options, self.report, self.dumper = options, report, dumper
        self.correspondence = NodeCorrespondence(gm) if options.audit else None
        self._done = False
        self._lock = threading.Lock()

    def passes_done(self) -> None:
        if self.correspondence is not None:
            self.correspondence.end()

    def wrap(self, lowered: GraphModule, function: CompiledFunction) -> CompiledFunction:
        """The function, with its first call audited or recorded. lowered: its graph."""

        def call(*args: Input) -> Outputs:
            if self._done or _is_capturing(args) or _only_padding(lowered, args):
                return function.call(*args)
            with self._lock:
                first, self._done = not self._done, True
            return (
                self._run_first_call(lowered, function.call, args)
                if first
                else function.call(*args)
            )

        return replace(function, call=call)

    def _run_first_call(
        self, lowered: GraphModule, call: GraphFunction, args: Sequence[Input]
    ) -> Outputs:
        audit, correspondence = None, self.correspondence
        if correspondence is not None:
            of_call = correspondence, lowered, args, self.report, self.options.audit_bound
            audit = self._try("audit", lambda: Audit(*of_call))
        inputs = (
            [x.clone() if isinstance(x, Tensor) else x for x in args] if self.options.record else []
        )
        out = call(*args)
        if self.options.record:
            self._try(
                "record", lambda: self.dumper.record(placeholders(lowered, inputs), flatten(out))
            )
        if audit is not None:
            self._try("audit", lambda: audit.end(flatten(out)))
        return out

    def _try(self, what: str, do: Callable[[], T]) -> T | None:
        """The result of do(); an exception becomes a note, unless strict."""
        try:
            with outside_of_tracing():
                return do()
        except Exception as error:  # a failed audit must not fail the program
            if self.options.strict:
                raise
            self.report.notes.append(f"{what} failed: {type(error).__name__}: {error}")
            log.warning("atomc could not %s a graph of %s: %s", what, self.report.model, error)
            return None


class Audit:
    """The audit of one call: it runs before the call, and `end` compares what the call returned."""

    def __init__(
        self,
        correspondence: NodeCorrespondence,
        lowered: GraphModule,
        args: Sequence[Argument],
        report: Report,
        bound: float | None,
    ):
        self.report, self.given_bound = report, bound
        start = time.perf_counter()
        inputs = placeholders(lowered, args)
        self.whole = _starts_here(lowered, args)
        sites = audit_sites(lowered, correspondence, from_start=self.whole)
        self.comparison = KernelComparison(correspondence, lowered, inputs, sites)
        self.kernels, self.measured = self.comparison.measured(_progress_bar)
        self.ranked = sorted(sites, key=lambda site: -self.measured[site.node].error.rank)
        self.order = rewrite_order(sites, list(report.requires))
        self.exact = self.comparison.captured(exact=True) if self.whole else []
        self.original = (
            worst(self.comparison.captured(exact=False), self.exact).relative if self.whole else 0.0
        )
        self.seconds = time.perf_counter() - start

    def end(self, outputs: Sequence[Argument]) -> None:
        """Store the findings in the report, and log them."""
        start = time.perf_counter()
        sites = [
            _site_row(site, self.measured[site.node], self.report.requires) for site in self.ranked
        ]
        findings = AuditFindings(sites=sites, notes=self.comparison.notes)
        if self.whole:
            findings.update(self._whole(outputs))
        else:
            self.comparison.notes.append(
                "the outputs of the graph are not compared: the step has several sequences, or "
                "one that "
                "began in an earlier call; attention is compared with its reference"
            )
        findings["seconds"] = self.seconds + time.perf_counter() - start
        self.report.audit = findings
        (log.warning if "blame" in findings else log.info)(
            "atomc audit of %s: %s", self.report.model, headline(findings)
        )

    def _whole(self, outputs: Sequence[Argument]) -> AuditFindings:
        """The errors of the outputs against fp32, and their cause if they exceed the bound."""
        compiled, kernels = worst(outputs, self.exact), worst(self.kernels, self.exact)
        bound = self.given_bound or max(MIN_BOUND, BOUND_FACTOR * self.original)
        findings: AuditFindings = {
            "outputs": {
                "compiled": compiled.relative,
                "kernels": kernels.relative,
                "original": self.original,
                "bound": bound,
            }
        }
        if kernels.relative > bound:
            findings["blame"] = self._blame(bound)
        elif compiled.relative > bound:
            findings["blame"] = Blame(rewrite="glue", module_path=None, places=0, runs=0, passes={})
        return findings

    def _blame(self, bound: float) -> Blame:
        def run(disabled: Sequence[AuditSite]) -> float:
            return worst(self.comparison.run_without(disabled), self.exact).relative

        return bisect_rewrites(run, self.ranked, self.order, bound, self.report.requires)


def _site_row(site: AuditSite, measured: SiteErrors, known: Collection[str]) -> SiteRow:
    """A site with the errors of its kernel and of the original nodes against fp32, as plain
    data.
    """
    return {
        "rewrite": site.rewrite,
        "rewrites": list(site.rewrites),
        "op": site.op,
        "kernel": site.kernel,
        "module_path": site.module_path,
        "layer": site.layer,
        "source": site.source,
        "against": measured.against,
        **measured.error.row(),
        "original": measured.original.row(),
        "passes": disabling_option(site, site.module_path, known),
    }


def _progress_bar(nodes: Iterable[Node]) -> Iterable[Node]:
    bar: Iterable[Node] = tqdm(nodes, desc="audit", unit="node", leave=False, disable=None)
    return bar


def _is_capturing(args: Sequence[Argument]) -> bool:
    """Whether a CUDA graph is being captured, during which tensors cannot be read."""
    return (
        any(isinstance(x, Tensor) and x.is_cuda for x in args)
        and torch.cuda.is_current_stream_capturing()
    )


def _only_padding(lowered: GraphModule, args: Sequence[Argument]) -> bool:
    """Whether it is a step without tokens, which the runtime uses to measure the memory of a
    step.
    """
    slots = [x for field, x in step_tensors(lowered, args).items() if field.field == "slots"]
    return bool(slots) and all(bool((x < 0).all()) for x in slots)


def _starts_here(lowered: GraphModule, args: Sequence[Argument]) -> bool:
    """Whether attention reads only rows of this call: no runtime, or one sequence from its first
    token on.
    """
    step = step_tensors(lowered, args)
    lengths, starts = step.get(StepInput("seq_lens")), step.get(StepInput("query_start"))
    if lengths is None or starts is None:
        return True
    rows = next(len(x) for field, x in step.items() if field.field == "slots")
    return bool(lengths.tolist() == [rows] and starts.tolist() == [0, rows])
