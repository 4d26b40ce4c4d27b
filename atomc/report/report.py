"""The reports of a process: what the compiler did to each graph, as text, HTML and JSON."""

import contextlib
import html
import json
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from atomc.files.json_types import JSONLike
from atomc.report.records import PARTS, CacheOutcome, GraphBreak, spans
from atomc.report.render.text import report_text
from atomc.report.report_data import ReportData

MAX_REPORTS = 256
VERSION = 1  # of the JSON format


@dataclass(repr=False)
class Report(ReportData):
    """What happened to one graph from Dynamo, as text, HTML and JSON."""

    def __str__(self) -> str:
        return self.to_text()

    def __repr__(self) -> str:
        state = "compiled" if self.treated else f"not treated: {self.why_not}"
        return (
            f"<Report of {self.model}, {state}: {len(self.sites)} sites of "
            f"{len({site.rewrite for site in self.sites})} rewrites, {len(self.near)} near misses>"
        )

    def _repr_html_(self) -> str:
        """The page of `to_html`, in a frame of its own as notebooks show it."""
        frame = html.escape(self.to_html())
        return f'<iframe srcdoc="{frame}" width="100%" height="700" style="border:0"></iframe>'

    def to_dict(self) -> dict[str, JSONLike]:
        """All fields as plain data."""
        return {
            "version": VERSION,
            **asdict(self),
            "matches": dict(self.matches),
            "cache": self.cache,
        }

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1, default=str)

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> "Report":
        """The report of `to_dict` data. Raises ValueError for other data or another version."""
        if not isinstance(data, Mapping) or data.get("version") != VERSION:
            raise ValueError(
                f"not a report of version {VERSION}: expected the output of `atomc explain --json`"
            )
        names = {f.name for f in fields(cls)} & set(data)
        values: dict[str, Any] = {
            name: [PARTS[name](**item) for item in data[name]] if name in PARTS else data[name]
            for name in names
        }
        values["kernels"] = [
            replace(choice, refused=[(provider, reason) for provider, reason in choice.refused])
            for choice in values.get("kernels", ())
        ]
        values["matches"] = Counter(values.get("matches", {}))
        if values.get("graph_break"):
            values["graph_break"] = GraphBreak(**values["graph_break"])
        # A report of an older version has only the text.
        values["cached"] = CacheOutcome(**data.get("cached", {"why": data.get("cache", "")}))
        return cls(**values)

    def to_html(self) -> str:
        """One HTML page that needs no network: passes, layers, kernels, costs."""
        from atomc.report.render.html import page  # imports sympy, which a warm start does not need

        return page([self])

    def to_text(self) -> str:
        """Tables of rewrites by layer, near misses, kernels and phases."""
        return report_text(self)


class Reports(list[Report]):
    """Reports, newest last."""

    @property
    def last_call(self) -> "Reports":
        """Those of the graphs that the last call of a compiled function made."""
        return Reports(report for report in self if report.call == self[-1].call)

    @property
    def breaks(self) -> list[GraphBreak]:
        """Graph breaks of the last call: the user's line and Dynamo's reason."""
        return [r.graph_break for r in self.last_call if r.graph_break is not None]

    @property
    def recompiles(self) -> list[str]:
        """The failed guard of each recompile."""
        return [report.recompile for report in self if report.recompile is not None]

    def why(self, rewrite: str, module_path: str | None = None) -> str:
        """Why the rewrite fired or did not, as Report.why, in all graphs of the last call: a line
        for each answer. Raises ValueError if no graph was compiled, or none knows the name.
        """
        graphs = self.last_call
        if not graphs:
            raise ValueError("no graph was compiled in this process: call the compiled function")
        if len(graphs) == 1:
            return graphs[0].why(rewrite, module_path)
        numbers: dict[str, list[int]] = {}
        unknown: list[ValueError] = []
        for number, graph in enumerate(graphs):
            try:
                numbers.setdefault(graph.reason(rewrite, module_path), []).append(number)
            except ValueError as error:  # an op that only other graphs have
                unknown.append(error)
        if not numbers:
            raise unknown[0]
        below = f" below {module_path}" if module_path else ""
        lines = [
            f"graph{'s' * (len(those) > 1)} {spans(those)} ({graphs[those[0]].title}): {reason}"
            for reason, those in numbers.items()
        ]
        return "\n  ".join([f"{rewrite}{below}:", *lines])


_reports: deque[Report] = deque(maxlen=MAX_REPORTS)


def reports() -> Reports:
    """The reports of this process, newest last, at most 256."""
    return Reports(_reports)


def keep(report: Report) -> Report:
    """Add a report to `reports()`."""
    _reports.append(report)
    return report


def forget(report: Report) -> None:
    """Remove the report of a compile that is started again."""
    with contextlib.suppress(ValueError):
        _reports.remove(report)
