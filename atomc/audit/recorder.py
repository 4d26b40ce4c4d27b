"""Looks over the shoulder of one compile, and at the first call of what it made.

`options={"audit": True}`: the result of that call is the program's; what was found lies in `report.audit`, and is logged
once. `options={"dump": DIR, "record": True}`: its inputs and outputs are kept beside the dump.
"""

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from tqdm import tqdm

from atomc.audit.bisect import Blame, blame, left_out
from atomc.audit.compare_kernels import Examination, Measured
from atomc.audit.error import worst
from atomc.audit.evaluate import flat, of_step, placeholders
from atomc.audit.node_correspondence import Trail
from atomc.audit.sites import Place, places_of, rewrites_in
from atomc.cache.generated import Function
from atomc.dumps.dump import Dumper
from atomc.ops.inputs import StepInput
from atomc.options import Options
from atomc.report import Report
from atomc.torch_compat.names import outside_of_tracing

log = logging.getLogger("atomc")

# Of the largest output: what the order of additions in fp32 may change.
LEAST_BOUND = 1e-4
# How much further from fp32 than the program itself what was made of it may be.
MORE_THAN_ITSELF = 2.0


class Watch:
    """One compile, from the captured graph on, and what it makes for each range of token counts."""

    def __init__(self, gm: GraphModule, options: Options, report: Report, dumper: Dumper):
        self.options, self.report, self.dumper = options, report, dumper
        self.trail = Trail(gm) if options.audit else None
        self._done = False
        self._lock = threading.Lock()

    def passes_done(self) -> None:
        if self.trail is not None:
            self.trail.end()

    def over(self, lowered: GraphModule, function: Function) -> Function:
        """The function, whose first call is looked at. lowered: the graph that it was made of."""

        def call(*args: Any) -> Any:
            if self._done or _in_capture(args) or _only_padding(lowered, args):
                return function.call(*args)
            with self._lock:
                first, self._done = not self._done, True
            return self._first(lowered, function.call, args) if first else function.call(*args)

        return replace(function, call=call)

    def _first(self, lowered: GraphModule, call: Callable[..., Any], args: Sequence[Any]) -> Any:
        audit = self._try("audit", lambda: self._audit(lowered, args)) if self.trail is not None else None
        given = [x.clone() if isinstance(x, Tensor) else x for x in args] if self.options.record else []
        out = call(*args)
        if self.options.record:
            self._try("record", lambda: self.dumper.record(placeholders(lowered, given), flat(out)))
        if audit is not None:
            self._try("audit", lambda: audit.end(flat(out)))
        return out

    def _try(self, what: str, do: Callable[[], Any]) -> Any:
        """Looking must not break what is looked at, unless strict."""
        try:
            with outside_of_tracing():
                return do()
        except Exception as error:  # whatever an audit stumbles over, the program goes on
            if self.options.strict:
                raise
            self.report.notes.append(f"{what} failed: {type(error).__name__}: {error}")
            log.warning("atomc could not %s a graph of %s: %s", what, self.report.model, error)
            return None

    def _audit(self, lowered: GraphModule, args: Sequence[Any]) -> "Audit":
        assert self.trail is not None
        return Audit(self.trail, lowered, args, self.report, self.options.audit_bound)


class Audit:
    """The audit of one call: before it, and with what it returned."""

    def __init__(self, trail: Trail, lowered: GraphModule, args: Sequence[Any], report: Report, bound: float | None):
        self.report, self.given_bound = report, bound
        start = time.perf_counter()
        inputs = placeholders(lowered, args)
        self.whole = _from_start(lowered, args)
        places = places_of(lowered, trail, from_start=self.whole)
        self.examined = Examination(trail, lowered, inputs, places)
        self.kernels, self.measured = self.examined.measured(_bar)
        self.ranked = sorted(places, key=lambda place: -self.measured[place.node].error.rank)
        self.order = rewrites_in(places, list(report.requires))
        self.exact = self.examined.captured(exact=True) if self.whole else []
        self.original = worst(self.examined.captured(exact=False), self.exact).relative if self.whole else 0.0
        self.seconds = time.perf_counter() - start

    def end(self, outputs: Sequence[Any]) -> None:
        """Write what was found into the report, and log it."""
        start = time.perf_counter()
        sites = [_site(place, self.measured[place.node], self.report.requires) for place in self.ranked]
        found: dict[str, Any] = {"sites": sites, "notes": self.examined.notes}
        if self.whole:
            found |= self._whole(outputs)
        else:
            found["notes"].append("what the whole graph returns is not compared: its sequences began in earlier calls, or "
                                  "there are several; attention is compared with its meaning")  # fmt: skip
        self.report.audit = {**found, "seconds": self.seconds + time.perf_counter() - start}
        self._log()

    def _whole(self, outputs: Sequence[Any]) -> dict[str, Any]:
        """What the call returned, against fp32; and who is to blame, if that is too far."""
        compiled, kernels = worst(outputs, self.exact), worst(self.kernels, self.exact)
        bound = self.given_bound or max(LEAST_BOUND, MORE_THAN_ITSELF * self.original)
        found: dict[str, Any] = {"outputs": {"compiled": compiled.relative, "kernels": kernels.relative,
                                             "original": self.original, "bound": bound}}  # fmt: skip
        if kernels.relative > bound:
            found["blame"] = asdict(self._blame(bound))
        elif compiled.relative > bound:
            found["blame"] = asdict(Blame("glue", None, 0, 0, {}))
        return found

    def _blame(self, bound: float) -> Blame:
        def run(left_out: Sequence[Place]) -> float:
            return worst(self.examined.without(left_out), self.exact).relative

        return blame(run, self.ranked, self.order, bound, self.report.requires)

    def _log(self) -> None:
        from atomc.render.audit import headline

        beyond = "blame" in self.report.audit
        (log.warning if beyond else log.info)("atomc audit of %s: %s", self.report.model, headline(self.report.audit))


def _site(place: Place, measured: Measured, known: Collection[str]) -> dict[str, Any]:
    """One row: a place, the error of what runs there and of the original nodes, against fp32."""
    return {
        "rewrite": place.rewrite, "rewrites": list(place.rewrites), "op": place.op, "kernel": place.kernel,
        "module_path": place.module_path, "layer": place.layer, "source": place.source, "against": measured.against,
        **asdict(measured.error), "original": asdict(measured.original),
        "passes": left_out(place, place.module_path, known),
    }  # fmt: skip


def _bar(nodes: Iterable[Node]) -> Iterable[Node]:
    bar: Iterable[Node] = tqdm(nodes, desc="audit", unit="node", leave=False, disable=None)
    return bar


def _in_capture(args: Sequence[Any]) -> bool:
    """Whether a CUDA graph is being captured: nothing may be looked at in it."""
    return any(isinstance(x, Tensor) and x.is_cuda for x in args) and torch.cuda.is_current_stream_capturing()


def _only_padding(lowered: GraphModule, args: Sequence[Any]) -> bool:
    """Whether it is a step of the runtime without a token, as those are that find out how much memory a step takes."""
    slots = [x for given, x in of_step(lowered, args).items() if given.field == "slots"]
    return bool(slots) and all(bool((x < 0).all()) for x in slots)


def _from_start(lowered: GraphModule, args: Sequence[Any]) -> bool:
    """Whether the captured graph sees all that attention sees: no runtime, or one sequence from its first token on."""
    step = of_step(lowered, args)
    lengths, starts = step.get(StepInput("seq_lens")), step.get(StepInput("query_start"))
    if lengths is None or starts is None:
        return True
    rows = next(len(x) for given, x in step.items() if given.field == "slots")
    return bool(lengths.tolist() == [rows] and starts.tolist() == [0, rows])
