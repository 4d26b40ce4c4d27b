"""The cache entry of one graph from Dynamo."""

from collections.abc import Sequence

from torch.fx import GraphModule

from atomc import kernels
from atomc.cache.artifact import Uncacheable
from atomc.cache.compiled import Compiled, serialize_compiled
from atomc.cache.graph_fingerprint import parts_of
from atomc.cache.lookup import CacheLookup
from atomc.cache.store import ProgramData, record_start, report_json
from atomc.report.records import CacheOutcome
from atomc.report.report import Report
from atomc.rewriting.graph_pass import Context
from atomc.torch_compat.tracing import fake_mode_of, guards_hold, guards_of


class GraphCache:
    """Loads or stores one graph with given floats, and sets `report.cached`.

    entry  the content of its cache entry now, None if there is none
    """

    def __init__(
        self,
        gm: GraphModule,
        context: Context,
        report: Report,
        floats: dict[int, float],
    ):
        self.report, self.options = report, context.options
        self.mode = fake_mode_of(gm.graph)
        self.sizes = [
            node.meta.get("example_value") for node in gm.graph.find_nodes(op="placeholder")
        ]
        self.lookup: CacheLookup | None = None
        self.entry: ProgramData | None = None
        if report.treated:
            if not report.cached.kind:
                report.cached = CacheOutcome("off")
            return
        self.lookup = CacheLookup(context.options, lambda: parts_of(gm, context, floats))
        report.cached = self.lookup.outcome

    @property
    def key(self) -> str | None:
        """The key of this graph; None if the cache was not used."""
        return (
            self.lookup.entry.key
            if self.lookup is not None and self.lookup.entry is not None
            else None
        )

    def load(self) -> tuple[Compiled, Sequence[int]] | None:
        """(the compiled graph, the numbers of the inputs that it writes) from the cache; None on a
        miss.
        """
        if self.lookup is None:
            return None
        loaded = self.lookup.load(self.report, self._mismatch)
        self.report.cached = self.lookup.outcome
        if loaded is None:
            return None
        compiled, self.entry = loaded
        self.report.phases["cache"] = self.lookup.seconds
        record_start(self.options, self.report)
        return compiled, list(self.entry["written"])

    def _mismatch(self, data: ProgramData) -> str | None:
        fits = guards_hold(self.mode, self.sizes, data["guards"])
        return None if fits else "compiled under other size guards"

    def store(self, compiled: Compiled, written: Sequence[int], around: str | None) -> None:
        """Write the compiled graph to the cache. around: work outside of it in each call, which an
        entry cannot hold.
        """
        plain = compiled.plain
        if self.lookup is None or self.lookup.entry is None or plain is None:
            return
        crowded = next((miss.found for miss in self.report.near if miss.kind == "packed"), None)

        def data() -> ProgramData:
            if around or crowded or self.report.bugs:
                raise Uncacheable(around or crowded or self.report.bugs[0])
            return {
                "written": list(written),
                "report": report_json(self.report),
                "guards": guards_of(self.mode, self.sizes),
                "missing": sorted(kernels.missing(self.options)),
                "compiled": serialize_compiled(compiled, plain()),
            }

        self.entry = self.lookup.store(data)
        self.report.cached = self.lookup.outcome
        record_start(self.options, self.report)
