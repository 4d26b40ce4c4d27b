"""What the compiler did to one graph, as data without tensors; atomc.report.render converts it to
text and HTML.
"""

import contextlib
import json
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from atomc.report.audit_findings import AuditFindings
from atomc.report.records import (
    PARTS,
    CacheOutcome,
    FusionOpportunity,
    Glue,
    GraphBreak,
    KernelChoice,
    Miss,
    OpCost,
    QuantizedWeightSize,
    Site,
    Stage,
    spans,
)
from atomc.report.render.text import report_text

MAX_REPORTS = 256
VERSION = 1  # of the JSON format


@dataclass
class Report:
    """What happened to one graph from Dynamo.

    matches  rewrite -> number of sites where it fired, also if a later rewrite consumed the result
    phases   seconds: lift, trace, passes, lower, glue
    """

    model: str
    treated: bool = False
    why_not: str = ""
    matches: Counter[str] = field(default_factory=Counter)
    sites: list[Site] = field(default_factory=list)
    kernels: list[KernelChoice] = field(default_factory=list)
    stages: list[Stage] = field(default_factory=list)
    phases: dict[str, float] = field(default_factory=dict)
    cuda_graphs: list[dict[str, Any]] = field(default_factory=list)
    machine: dict[str, Any] = field(
        default_factory=dict
    )  # name, arch, and bandwidth and flops if known
    cached: CacheOutcome = field(default_factory=CacheOutcome)
    notes: list[str] = field(default_factory=list)
    glue: list[Glue] = field(default_factory=list)
    state: list[str] = field(default_factory=list)
    graph_break: GraphBreak | None = None
    recompile: str | None = None
    near: list[Miss] = field(default_factory=list)
    off: list[str] = field(default_factory=list)  # passes that are disabled
    known: list[str] = field(default_factory=list)  # every rewrite that could have fired
    absent: dict[str, str] = field(
        default_factory=dict
    )  # rewrite -> the op it needs that is not in the graph
    taken: dict[str, str] = field(
        default_factory=dict
    )  # rewrite -> the rewrite that consumed its ops
    requires: dict[str, list[str]] = field(
        default_factory=dict
    )  # rewrite -> earlier passes whose ops it matches
    num_ops: dict[str, int] = field(default_factory=dict)  # ops left in the graph before lowering
    costs: list[OpCost] = field(default_factory=list)  # of the graph before lowering, in its order
    savings: list[FusionOpportunity] = field(default_factory=list)
    few_bits: list[QuantizedWeightSize] = field(default_factory=list)
    about: dict[str, str] = field(default_factory=dict)  # rewrite -> the docstring of its file
    audit: AuditFindings = field(default_factory=AuditFindings)  # of the first call, if requested
    bugs: list[str] = field(
        default_factory=list
    )  # of the matcher: rejections that it could not explain

    @property
    def cache(self) -> str:
        """The outcome of the cache: "hit", or the reason for a miss."""
        return str(self.cached)

    @property
    def layers(self) -> list[int]:
        """The numbers of the repeated layers in the graph."""
        return sorted({cost.layer for cost in self.costs if cost.layer is not None})

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def misses(self, rewrite: str) -> list[Miss]:
        """The near misses of this rewrite. Raises ValueError for a rewrite that does not exist."""
        self._check(rewrite)
        return [miss for miss in self.near if miss.rewrite == rewrite]

    def why(self, rewrite: str, module_path: str | None = None) -> str:
        """Why the rewrite fired or did not, in the whole graph or below one module.

        One of: pass off; graph not treated; no anchor; near miss; taken by another rewrite; broken
        here; fired, but a kernel refused; fired. Raises ValueError for a rewrite that does not
        exist.
        """
        everywhere = rewrite in self.off or not self.treated
        place = f" below {module_path}" if module_path and not everywhere else ""
        return f"{rewrite}{place}: {self.reason(rewrite, module_path)}"

    def reason(self, rewrite: str, module_path: str | None = None) -> str:
        """As `why`, without the names of rewrite and module."""
        self._check(rewrite)
        if rewrite in self.off:
            return f"the pass is off (options={{'passes': {{{rewrite!r}: False}}}})"
        if not self.treated:
            return f"the graph was not treated: {self.why_not}"
        sites = [
            site
            for site in self.sites
            if site.rewrite == rewrite and _below(site.module_path, module_path)
        ]
        near = [miss for miss in self.misses(rewrite) if _below(miss.module_path, module_path)]
        if sites:
            off = [miss for miss in near if miss.kind == "off"]
            return self._fired(rewrite, sites) + (
                f"; {off[0].found} and at {len(off)} sites in all" if off else ""
            )
        if near:
            more = f" (and {len(near) - 1} more like it)" if len(near) > 1 else ""
            if near[0].kind in ("taken", "off"):
                return f"{near[0].found}{more}"
            return f"near miss{more}: {near[0].text()}"
        return self._absent(rewrite, module_path)

    def _absent(self, rewrite: str, module_path: str | None) -> str:
        """Why a rewrite has neither sites nor near misses."""
        if rewrite in self.taken:
            return self.taken[rewrite]
        if self.graph_break is not None:
            return (
                f"broken here: Dynamo ended the graph at {self.graph_break.source} "
                f"({self.graph_break.code}): {self.graph_break.reason}"
            )
        for earlier in self.built_on(rewrite):
            upstream = [
                miss
                for miss in self.near
                if miss.rewrite == earlier and _below(miss.module_path, module_path)
            ]
            if upstream:
                return (
                    f"needs {earlier}, which did not fire everywhere. Near miss: "
                    f"{upstream[0].text()}"
                )
        return (
            f"no anchor: {self.absent.get(rewrite, 'nothing like it is in this part of the graph')}"
        )

    def built_on(self, rewrite: str) -> list[str]:
        """The passes that this one requires, directly or indirectly, nearest first."""
        found = [rewrite]
        for name in found:
            found += [earlier for earlier in self.requires.get(name, []) if earlier not in found]
        return found[1:]

    def _fired(self, rewrite: str, sites: list[Site]) -> str:
        layers = spans(site.layer for site in sites if site.layer is not None)
        where = f" in layers {layers}" if layers else ""
        text = f"fired at {len(sites)} site{'s' * (len(sites) > 1)}{where}"
        refused = {
            (provider, reason)
            for choice in self.kernels
            if choice.op == rewrite
            for provider, reason in choice.refused
        }
        chosen = Counter(choice.chosen for choice in self.kernels if choice.op == rewrite)
        if chosen:
            text += "; runs as " + ", ".join(
                f"{name} x{count}" for name, count in chosen.most_common()
            )
        if refused:
            text += "; refused: " + "; ".join(
                f"{provider}: {reason}" for provider, reason in sorted(refused)
            )
        return text

    def _check(self, rewrite: str) -> None:
        if self.known and rewrite not in (*self.known, *self.off) and not self.matches[rewrite]:
            raise ValueError(f"no rewrite {rewrite!r}; rewrites are {sorted(self.known)}")

    def to_dict(self) -> dict[str, Any]:
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
        found: dict[str, Any] = {
            name: [PARTS[name](**item) for item in data[name]] if name in PARTS else data[name]
            for name in names
        }
        found["kernels"] = [
            replace(choice, refused=[(provider, reason) for provider, reason in choice.refused])
            for choice in found.get("kernels", ())
        ]
        found["matches"] = Counter(found.get("matches", {}))
        if found.get("graph_break"):
            found["graph_break"] = GraphBreak(**found["graph_break"])
        # A report of an older version has only the text.
        found["cached"] = CacheOutcome(**data.get("cached", {"why": data.get("cache", "")}))
        return cls(**found)

    def to_html(self) -> str:
        """One HTML page that needs no network: passes, layers, kernels, costs."""
        from atomc.report.render.html import page  # imports sympy, which a warm start does not need

        return page([self])

    def to_text(self) -> str:
        """Tables of rewrites by layer, near misses, kernels and phases."""
        return report_text(self)


def _below(path: str, prefix: str | None) -> bool:
    return (
        prefix is None
        or path == prefix
        or path.startswith(prefix + ".")
        or f".{prefix}." in f".{path}."
    )


class Reports(list[Report]):
    """Reports, newest last."""

    @property
    def breaks(self) -> list[GraphBreak]:
        """Graph breaks: the user's line and Dynamo's reason."""
        return [report.graph_break for report in self if report.graph_break is not None]

    @property
    def recompiles(self) -> list[str]:
        """The failed guard of each recompile."""
        return [report.recompile for report in self if report.recompile is not None]


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
