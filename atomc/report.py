"""What the compiler did to one graph, as data. No tensors in it; `render` makes text of it."""

import contextlib
import json
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal

MOST_REPORTS = 256
VERSION = 1  # of the data


@dataclass(frozen=True)
class Site:
    """One place where a rewrite fired. `source` is "file.py:12" of the user's program."""

    rewrite: str
    module_path: str
    layer: int | None
    source: str
    attrs: dict[str, Any] = field(default_factory=dict)


# What keeps a pattern from matching: in the structure, in the values, in rewriting.
MissKind = Literal["extra op", "missing op", "missing cast", "other op", "operand order", "arguments", "attribute",
                   "scalar", "same value", "no reader",
                   "dtype", "size", "view", "device", "extra user", "mutation", "cycle",
                   "guard", "taken", "off", "packed"]  # fmt: skip


@dataclass(frozen=True)
class Miss:
    """One place where a rewrite nearly fired. `depth` is the share of the pattern that is there."""

    rewrite: str
    variant: str
    module_path: str
    layer: int | None
    source: str
    depth: float
    kind: MissKind
    expected: str
    found: str
    nodes: list[str] = field(default_factory=list)

    def text(self) -> str:
        where = self.module_path or "the graph"
        line = f" ({self.source})" if self.source else ""
        return f"{self.rewrite} in {where}{line}, {self.depth:.0%} there: expected {self.expected}; found {self.found}"


def another(provider: str) -> str:
    return f"another {provider} kernel"


@dataclass(frozen=True)
class KernelChoice:
    """What runs one op for a range of token counts.

    refused   (provider, reason), in order of preference
    codes     of each of these the code (atomc.op.Refusal); none in a report of an older version
    """

    op: str
    module_path: str
    tokens: str
    chosen: str
    refused: list[tuple[str, str]] = field(default_factory=list)
    node: str = ""
    codes: list[str] = field(default_factory=list)

    @property
    def others(self) -> list[tuple[str, str]]:
        """`refused` as a reader wants it named: a provider whose kernel runs the op has refused with another one."""
        return [(another(provider) if provider == self.chosen else provider, reason) for provider, reason in self.refused]

    def refused_by(self, *codes: str) -> list[tuple[str, str]]:
        """Those of `refused` that have one of these codes."""
        return [pair for pair, code in zip(self.refused, self.codes, strict=False) if code in codes]


@dataclass(frozen=True)
class Stage:
    """One pass that changed the graph, and the graph after it (atomc.graph_printer).

    text    "" unless the report is of explain or goes to a page, or the stage is the last one
    before  the graph before it, where that is not the graph after the stage in front
    """

    name: str
    changed: int
    text: str
    before: str = ""


@dataclass(frozen=True)
class OpCost:
    """What one kernel's worth of work must move and compute, as formulas of T, R, S and C (see atomc.cost).

    nodes    of the graph before lowering
    made_of  the nodes of the captured graph that became these
    apart    bytes if each of the nodes ran alone; "" where that is the same
    made_by  the last rewrite that had a hand in it, "" for what the program wrote itself
    """

    op: str
    module_path: str
    layer: int | None
    source: str
    bytes: str
    flops: str
    nodes: list[str] = field(default_factory=list)
    made_of: list[str] = field(default_factory=list)
    apart: str = ""
    made_by: str = ""


@dataclass(frozen=True)
class Saving:
    """Bytes that need not move if kernels were one: where a rewrite nearly fired, and where neighbours could be fused.

    kind  "near miss", what is the rewrite; "neighbours", what is the ops of the two; "glue", pointwise ops run one by one
    """

    kind: str
    what: str
    module_path: str
    layer: int | None
    source: str
    bytes: str


@dataclass(frozen=True)
class FewBits:
    """A linear whose weight is in few bits: bytes of it and its scales, and those of the weight in the output's dtype."""

    op: str
    scheme: str
    module_path: str
    layer: int | None
    node: str
    bytes: int
    full_bytes: int


@dataclass(frozen=True)
class GraphBreak:
    """Where Dynamo ended a graph early, and why."""

    source: str
    code: str
    reason: str


@dataclass(frozen=True)
class CacheOutcome:
    """What the cache did for a graph.

    kind      "off": it was not asked; "": nothing was to run
    why       why it was no hit
    not_kept  why what was compiled then was not written
    """

    kind: Literal["", "hit", "miss", "off"] = ""
    why: str = ""
    not_kept: str = ""

    def __str__(self) -> str:
        text = ": ".join(part for part in (self.kind, self.why) if part)
        return f"{text}; not kept: {self.not_kept}" if self.not_kept else text


@dataclass(frozen=True)
class Glue:
    """What compiles the ops between kernels, "inductor" or "eager"; the report has the note among its others."""

    how: str
    note: str


# What the lists of a report hold.
PARTS: dict[str, Any] = {"sites": Site, "kernels": KernelChoice, "stages": Stage, "near": Miss, "costs": OpCost,
                         "savings": Saving, "few_bits": FewBits, "glue": Glue}  # fmt: skip


@dataclass
class Report:
    """What happened to one graph that Dynamo gave us.

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
    machine: dict[str, Any] = field(default_factory=dict)  # name, arch, and bandwidth and flops if its data sheet says them
    cached: CacheOutcome = CacheOutcome()
    notes: list[str] = field(default_factory=list)
    glue: list[Glue] = field(default_factory=list)
    state: list[str] = field(default_factory=list)
    graph_break: GraphBreak | None = None
    recompile: str | None = None
    near: list[Miss] = field(default_factory=list)
    off: list[str] = field(default_factory=list)  # passes left out
    known: list[str] = field(default_factory=list)  # every rewrite that could have fired
    absent: dict[str, str] = field(default_factory=dict)  # rewrite -> which telling op is not in the graph
    taken: dict[str, str] = field(default_factory=dict)  # rewrite -> which one took its ops
    requires: dict[str, list[str]] = field(default_factory=dict)  # rewrite -> earlier ones whose ops it builds on
    num_ops: dict[str, int] = field(default_factory=dict)  # ops left in the graph before lowering
    costs: list[OpCost] = field(default_factory=list)  # of the graph before lowering, in its order
    savings: list[Saving] = field(default_factory=list)
    few_bits: list[FewBits] = field(default_factory=list)
    about: dict[str, str] = field(default_factory=dict)  # rewrite -> what it does: the docstring of its file
    audit: dict[str, Any] = field(default_factory=dict)  # of the first call, if one was asked for: see docs/audit.md
    bugs: list[str] = field(default_factory=list)  # of the matcher: what it refused without a reason, or could not explain

    @property
    def cache(self) -> str:
        """What the cache did for the graph: "hit", or why not."""
        return str(self.cached)

    @property
    def layers(self) -> list[int]:
        """The numbers of the repeated layers in the graph."""
        return sorted({cost.layer for cost in self.costs if cost.layer is not None})

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def misses(self, rewrite: str) -> list[Miss]:
        """Where this rewrite nearly fired. Raises ValueError for a rewrite that does not exist."""
        self._check(rewrite)
        return [miss for miss in self.near if miss.rewrite == rewrite]

    def why(self, rewrite: str, module_path: str | None = None) -> str:
        """Why the rewrite fired or did not, in the whole graph or below one module.

        One of: pass off; graph not treated; no anchor; near miss; taken by another rewrite; broken here; fired, but a
        kernel refused; fired. Raises ValueError for a rewrite that does not exist.
        """
        everywhere = rewrite in self.off or not self.treated
        place = f" below {module_path}" if module_path and not everywhere else ""
        return f"{rewrite}{place}: {self.reason(rewrite, module_path)}"

    def reason(self, rewrite: str, module_path: str | None = None) -> str:
        """What `why` says, without the names of rewrite and module."""
        self._check(rewrite)
        if rewrite in self.off:
            return f"the pass is off (options={{'passes': {{{rewrite!r}: False}}}})"
        if not self.treated:
            return f"the graph was not treated: {self.why_not}"
        sites = [site for site in self.sites if site.rewrite == rewrite and _below(site.module_path, module_path)]
        near = [miss for miss in self.misses(rewrite) if _below(miss.module_path, module_path)]
        if sites:
            off = [miss for miss in near if miss.kind == "off"]
            return self._fired(rewrite, sites) + (f"; {off[0].found} and at {len(off)} sites in all" if off else "")
        if near:
            more = f" (and {len(near) - 1} more like it)" if len(near) > 1 else ""
            if near[0].kind in ("taken", "off"):
                return f"{near[0].found}{more}"
            return f"near miss{more}: {near[0].text()}"
        return self._absent(rewrite, module_path)

    def _absent(self, rewrite: str, module_path: str | None) -> str:
        """Why a rewrite neither fired nor nearly fired."""
        if rewrite in self.taken:
            return self.taken[rewrite]
        if self.graph_break is not None:
            return (f"broken here: Dynamo ended the graph at {self.graph_break.source} "
                    f"({self.graph_break.code}): {self.graph_break.reason}")  # fmt: skip
        for earlier in self.built_on(rewrite):
            upstream = [miss for miss in self.near if miss.rewrite == earlier and _below(miss.module_path, module_path)]
            if upstream:
                return f"needs {earlier}, which did not fire everywhere. Near miss: {upstream[0].text()}"
        return f"no anchor: {self.absent.get(rewrite, 'nothing like it is in this part of the graph')}"

    def built_on(self, rewrite: str) -> list[str]:
        """The passes that must run before this one, nearest first."""
        found = [rewrite]
        for name in found:
            found += [earlier for earlier in self.requires.get(name, []) if earlier not in found]
        return found[1:]

    def _fired(self, rewrite: str, sites: list[Site]) -> str:
        layers = spans(site.layer for site in sites if site.layer is not None)
        where = f" in layers {layers}" if layers else ""
        text = f"fired at {len(sites)} site{'s' * (len(sites) > 1)}{where}"
        refused = {(provider, reason) for choice in self.kernels if choice.op == rewrite
                   for provider, reason in choice.refused}  # fmt: skip
        chosen = Counter(choice.chosen for choice in self.kernels if choice.op == rewrite)
        if chosen:
            text += "; runs as " + ", ".join(f"{name} x{count}" for name, count in chosen.most_common())
        if refused:
            text += "; refused: " + "; ".join(f"{provider}: {reason}" for provider, reason in sorted(refused))
        return text

    def _check(self, rewrite: str) -> None:
        if self.known and rewrite not in (*self.known, *self.off) and not self.matches[rewrite]:
            raise ValueError(f"no rewrite {rewrite!r}; rewrites are {sorted(self.known)}")

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain data."""
        return {"version": VERSION, **asdict(self), "matches": dict(self.matches), "cache": self.cache}

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1, default=str)

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> "Report":
        """The report that `to_dict` or its JSON came from. Raises ValueError for what is none."""
        if not isinstance(data, Mapping) or data.get("version") != VERSION:
            raise ValueError(f"no report of version {VERSION}: expected what `atomc explain --json` writes")
        names = {f.name for f in fields(cls)} & set(data)
        found: dict[str, Any] = {
            name: [PARTS[name](**item) for item in data[name]] if name in PARTS else data[name] for name in names
        }
        found["kernels"] = [replace(choice, refused=[(provider, reason) for provider, reason in choice.refused])
                            for choice in found.get("kernels", ())]  # fmt: skip
        found["matches"] = Counter(found.get("matches", {}))
        if found.get("graph_break"):
            found["graph_break"] = GraphBreak(**found["graph_break"])
        # A report of an older version has the sentence only.
        found["cached"] = CacheOutcome(**data.get("cached", {"why": data.get("cache", "")}))
        return cls(**found)

    def to_html(self) -> str:
        """One page that needs no network: passes, layers, kernels, costs."""
        from atomc.render.html import page

        return page([self])

    def to_text(self) -> str:
        """A table per question: rewrites by layer, near misses, kernels, phases."""
        from atomc.render.text import report_text

        return report_text(self)


def _below(path: str, prefix: str | None) -> bool:
    return prefix is None or path == prefix or path.startswith(prefix + ".") or f".{prefix}." in f".{path}."


def spans(numbers: Iterable[int]) -> str:
    """0, 1, 2, 5 -> "0-2, 5"."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(f"{a}-{b}" if a != b else str(a) for a, b in runs)


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


_reports: deque[Report] = deque(maxlen=MOST_REPORTS)


def reports() -> Reports:
    """What happened to each graph of this process, newest last, at most 256."""
    return Reports(_reports)


def keep(report: Report) -> Report:
    """Add a report to those that `reports()` lists."""
    _reports.append(report)
    return report


def forget(report: Report) -> None:
    """Take back a report of a compile that starts again."""
    with contextlib.suppress(ValueError):
        _reports.remove(report)
