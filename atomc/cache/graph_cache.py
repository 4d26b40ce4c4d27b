"""A cold or a warm start of one graph of Dynamo's."""

from collections.abc import Sequence
from typing import Any

from torch.fx import GraphModule

from atomc.cache.artifact import Unstorable
from atomc.cache.compiled import Compiled
from atomc.cache.graph_fingerprint import parts_of
from atomc.cache.lookup import Start
from atomc.cache.store import Plain, plain_report, remember
from atomc.graph_pass import Context
from atomc.report import CacheOutcome, Report
from atomc.torch_compat.tracing import fake_mode_of, guards_hold, guards_of


class GraphStart:
    """One compile of one graph, with given floats. `report.cached` says what becomes of it.

    entry  what the cache holds of it now, if anything
    """

    def __init__(
        self, gm: GraphModule, example_inputs: Sequence[Any], context: Context, report: Report, floats: dict[int, float]
    ):
        self.report, self.options = report, context.options
        self.mode = fake_mode_of(gm.graph)
        self.sizes = [node.meta.get("example_value") for node in gm.graph.find_nodes(op="placeholder")]
        self.start: Start | None = None
        self.entry: Plain | None = None
        if report.treated:
            if not report.cached.kind:
                report.cached = CacheOutcome("off")
            return
        self.start = Start(context.options, lambda: parts_of(
            gm, example_inputs, context.options, context.platform, floats, paged=context.paged))  # fmt: skip
        report.cached = self.start.outcome

    @property
    def key(self) -> str | None:
        """What the cache calls this graph; None where it was not asked."""
        return self.start.entry.key if self.start is not None and self.start.entry is not None else None

    def found(self) -> tuple[Compiled, Sequence[int]] | None:
        """The compiled graph, and the numbers of the inputs that it writes, if an earlier start has kept them."""
        if self.start is None:
            return None
        found = self.start.found(self.report, self._misfit)
        self.report.cached = self.start.outcome
        if found is None:
            return None
        compiled, self.entry = found
        self.report.phases["cache"] = self.start.seconds
        remember(self.options, self.report)
        return compiled, list(self.entry["written"])

    def _misfit(self, data: Plain) -> str | None:
        fits = guards_hold(self.mode, self.sizes, data["guards"])
        return None if fits else "compiled for sizes of another kind"

    def keep(self, compiled: Compiled, written: Sequence[int], around: str | None) -> None:
        """Write what was compiled to the cache. around: what else happens in each call, which the entry would miss."""
        plain = compiled.plain
        if self.start is None or self.start.entry is None or plain is None:
            return
        crowded = next((miss.found for miss in self.report.near if miss.kind == "packed"), None)

        def data() -> Plain:
            if around or crowded or self.report.bugs:
                raise Unstorable(around or crowded or self.report.bugs[0])
            return {"written": list(written), "report": plain_report(self.report),
                    "guards": guards_of(self.mode, self.sizes), "compiled": plain()}  # fmt: skip

        self.entry = self.start.keep(data)
        self.report.cached = self.start.outcome
        remember(self.options, self.report)
