"""Reports as one HTML file: what the compiler did, by pass, layer and op.

The file needs no network and can be opened from disk. Its content security policy allows only its
own script and style; names from a model are escaped.
"""

import base64
import hashlib
import itertools
import json
import re
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypedDict

from atomc.cost.efficiency import GLUE, LAUNCH, name_in_table, shipped
from atomc.graph.graph_printer import NodeLine, parse
from atomc.json_types import JSONLike
from atomc.platform import DESCRIBED
from atomc.report.kernel_ranges import kernels_by_tokens
from atomc.report.records import (
    KernelChoice,
    Miss,
    MoeLayer,
    OpCost,
    Site,
    another_kernel,
    spans,
)
from atomc.report.render import formula
from atomc.report.render.compare import Comparison
from atomc.report.render.graph_diff import Block, Hunk, fold_layers, hunks
from atomc.report.render.table import collapsed
from atomc.report.render.text import NOT_REWRITES
from atomc.report.report_data import ReportData
from atomc.token_range import ALL_TOKENS, Tokens

HERE = Path(__file__).parent
# Codes of refusals that do not depend on the op's arguments: by the machine, and by design.
MACHINE_CODES = ("hardware", "library")
DESIGN_CODES = ("tokens", "slower")
# Per pass; a model with different layers has thousands.
MAX_HUNKS = 60

Entry = tuple[str, str]  # (label, text)


def page(
    reports: Sequence[ReportData],
    others: Sequence[ReportData] = (),
    names: tuple[str, str] = ("first", "second"),
) -> str:
    """The HTML of reports, one tab per graph; with `others`, also of those and of the differences.

    Raises ImportError without jinja2.
    """
    try:
        from jinja2 import Environment, FileSystemLoader, StrictUndefined
    except ImportError as error:
        raise ImportError(
            "a report as HTML needs the library `jinja2`: pip install 'atomc[report]'"
        ) from error
    environment = Environment(
        loader=FileSystemLoader(HERE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    style, script = (f"\n{(HERE / name).read_text()}" for name in ("report.css", "report.js"))
    graphs = [Graph(i, report, names[0] if others else "") for i, report in enumerate(reports)]
    graphs += [Graph(len(reports) + i, report, names[1]) for i, report in enumerate(others)]
    compared = [Comparison(a, b, names) for a, b in zip(reports, others, strict=False)]
    data = {"graphs": [graph.data() for graph in graphs], "machines": _machines()}
    environment.filters["bytes"] = format_bytes
    title = f"{names[0]} compared with {names[1]}" if compared else "What the compiler did"
    if graphs and not compared:
        title += f" to {reports[0].model}"
    many = len(graphs) > 1
    text = environment.get_template("report.html").render(
        graphs=graphs,
        many=many,
        compared=compared,
        names=names,
        title=title,
        machines=data["machines"],
        spans=spans,
        style=style,
        script=script,
        data=_embedded(data),
        policy=policy(style, script),
    )
    return re.sub(r">\n\s*<", "><", text).lstrip()


def policy(style: str, script: str) -> str:
    """The content security policy: only this style and this script."""
    return (
        f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; "
        "base-uri 'none'; form-action 'none'"
    )


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _embedded(data: JSONLike) -> str:
    """JSON that is safe inside a script element."""
    text = json.dumps(data, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def format_bytes(size: float) -> str:
    """A size in bytes as text: "12.5 MB"."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(size) < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"


def _machines() -> list[dict[str, JSONLike]]:
    """The machines with known data sheets, with their measured efficiencies."""
    return [
        _machine(p.name, p.bandwidth, p.flops, p.device) for p in DESCRIBED.values() if p.bandwidth
    ]


def _machine(
    name: str, bandwidth: float | None, flops: float | None, device: str
) -> dict[str, JSONLike]:
    """launch: minimum seconds of a kernel; rows: (op, kernel, first, last, floor, efficiency) of
    atomc.cost.efficiency.
    """
    table = shipped().get(name)
    rows = (
        [(row.op, row.kernel, row.first, row.last, row.floor, row.efficiency) for row in table.rows]
        if table
        else []
    )
    return {
        "name": name,
        "bandwidth": table.bandwidth if table else bandwidth,
        "flops": table.flops if table else flops,
        "launch": LAUNCH if device == "cuda" else 0.0,
        "rows": rows,
    }


class Cell(TypedDict):
    """One cell of a Grid. reason: index of its text."""

    state: str
    number: int
    reason: int


class GridRow(TypedDict):
    """One rewrite in a Grid. total: number of sites."""

    name: str
    about: str
    cells: list[Cell]
    total: int


class OpRow(TypedDict):
    """Equal kernels of a graph.

    runs      (kernel, its range of tokens as text)
    ranges    (kernel, its range of tokens)
    refused   (provider, reason); anywhere: those that do not depend on the arguments; rather: of
              kernels that are preferred
    trees     formulas of the bytes and the FLOPs
    """

    op: str
    path: str
    count: int
    layers: str
    runs: list[tuple[str, str]]
    ranges: list[tuple[str, Tokens]]
    refused: list[Entry]
    anywhere: set[Entry]
    rather: list[Entry]
    bytes: str
    flops: str
    rate: int
    source: str
    trees: list[formula.Tree | None]
    nodes: int
    origins: list[NodeLine]
    made_by: str


class Graph:
    """One graph, in the form that the template needs."""

    def __init__(self, number: int, report: ReportData, group: str = ""):
        self.report, self.id = report, f"g{number}"
        self.label = f"{group}: {report.model}" if group else report.model
        self.tab = f"{number}: {self.label}"
        self.captured, self.final = _captured(report), _final(report)
        self.choices: dict[str, list[KernelChoice]] = {}
        for choice in report.kernels:
            self.choices.setdefault(choice.node, []).append(choice)
        self.not_here = _unavailable_providers(report.kernels)
        self.ops = self._ops()
        self.grid = Grid(report)
        self.passes = _passes(report)
        self.savings = self._savings()
        self.second = self._second_choices()
        self.quantized_weights = _quantized_weights(report, self.choices)
        self.moe_layers = _moe_layers(report, self.choices)
        self.symbols = sorted(
            {name for row in self.ops for tree in row["trees"] for name in formula.names_in(tree)}
        )

    @property
    def machine(self) -> dict[str, JSONLike]:
        """The machine of the compile."""
        own = self.report.machine
        return _machine(
            own.get("name", ""), own.get("bandwidth"), own.get("flops"), own.get("device", "cpu")
        )

    @property
    def counts(self) -> list[tuple[str, int]]:
        names = [name for name in dict.fromkeys(self.report.known) if name not in NOT_REWRITES]
        return [(name, self.report.matches[name]) for name in names if self.report.matches[name]]

    @property
    def seconds(self) -> float:
        return sum(self.report.phases.values())

    @property
    def phases(self) -> list[tuple[str, float]]:
        return [(name, seconds) for name, seconds in self.report.phases.items() if seconds > 0]

    @property
    def captured_blocks(self) -> list[Block]:
        return fold_layers(self.captured)

    @property
    def final_blocks(self) -> list[Block]:
        return fold_layers(self.final)

    @property
    def cuda_graphs(self) -> list[tuple[str, int | list[list[int]]]]:
        """(sizes, bytes) of each CUDA graph."""
        return [
            (
                ", ".join(f"{name} {value}" for name, value in graph.items() if name != "bytes"),
                graph.get("bytes", 0),
            )
            for graph in self.report.cuda_graphs
        ]

    @property
    def free(self) -> list[str]:
        """Sizes other than those of a step; each has its own slider."""
        return [name for name in self.symbols if name not in ("T", "R", "S", "C")]

    @property
    def has_glue(self) -> bool:
        return any(row["kind"] == "glue" for row in self.savings)

    @property
    def about(self) -> list[tuple[str, str]]:
        return [(name, text) for name, text in self.report.about.items() if text]

    @property
    def sections(self) -> list[tuple[str, str]]:
        """(id, title) of the sections with content."""
        found = [
            ("rewrites", "Rewrites", self.grid.rows),
            ("costs", "Kernels and cost", self.ops),
            ("left", "Left on the table", self.savings or self.second),
            ("bits", "Quantized weights", self.quantized_weights),
            ("moe", "Mixtures of experts", self.moe_layers),
            ("passes", "Passes", self.passes),
            ("graph", "Graph", self.captured or self.final),
            ("start", "Start", True),
            ("about", "What rewrites do", self.about),
        ]
        return [(name, title) for name, title, there in found if there]

    @property
    def shown(self) -> set[str]:
        return {name for name, _ in self.sections}

    @property
    def cache_words(self) -> str:
        """The outcome of the cache in a sentence."""
        cached = self.report.cached
        if cached.kind == "hit":
            return (
                "Hit: this graph was compiled earlier. No pass ran; the information on "
                "passes is from that compile."
            )
        why = str(replace(cached, kind=""))
        if cached.kind == "miss":
            return f"Miss, compiled again: {why}."
        if cached.kind == "off":
            return f"Not used ({why or 'off'})."
        return f"The cache: {why}." if why else "Not used: there was nothing to compile."

    def data(self) -> dict[str, JSONLike]:
        """The data for the script of the page."""
        return {
            "id": self.id,
            "ops": [_computed(row) for row in self.ops],
            "savings": [[row["count"], row["tree"]] for row in self.savings],
            "machine": self.machine,
            "phases": [seconds for _, seconds in self.phases],
            "reasons": self.grid.reasons,
        }

    def _ops(self) -> list[OpRow]:
        """Groups of equal kernels: modules, providers, formulas, and the captured nodes."""
        origin = {line.name: line for line in self.captured}
        groups: dict[Hashable, OpRow] = {}
        layers: dict[Hashable, set[int]] = {}
        for cost in self.report.costs:
            choices = [choice for node in cost.nodes for choice in self.choices.get(node, [])]
            runs = list(dict.fromkeys((choice.tokens, choice.chosen) for choice in choices))
            refused = list(dict.fromkeys(other for choice in choices for other in choice.others))
            anywhere = {
                pair
                for choice in choices
                for pair in choice.refused_by(*MACHINE_CODES, *DESIGN_CODES)
            }
            key = (
                cost.op,
                collapsed(cost.module_path),
                cost.bytes,
                cost.flops,
                cost.rate,
                tuple(runs),
                tuple(refused),
            )
            group = groups.setdefault(
                key,
                {
                    "op": cost.op,
                    "path": collapsed(cost.module_path),
                    "count": 0,
                    "layers": "",
                    "runs": _runs(runs),
                    "ranges": _ranges(runs),
                    "refused": refused,
                    "anywhere": anywhere,
                    "rather": [],
                    "bytes": cost.bytes,
                    "flops": cost.flops,
                    "rate": cost.rate,
                    "source": cost.source,
                    "trees": [formula.tree(cost.bytes), formula.tree(cost.flops)],
                    "nodes": len(cost.nodes),
                    "origins": _origins(cost, origin),
                    "made_by": cost.made_by,
                },
            )
            group["count"] += 1
            if cost.layer is not None:
                layers.setdefault(key, set()).add(cost.layer)
        return [{**group, "layers": spans(layers.get(key, ()))} for key, group in groups.items()]

    def _savings(self) -> list[dict[str, Any]]:
        groups: dict[Hashable, dict[str, Any]] = {}
        for saving in self.report.savings:
            key = (saving.kind, saving.what, collapsed(saving.module_path), saving.bytes)
            group = groups.setdefault(
                key,
                {
                    **asdict(saving),
                    "path": key[2],
                    "count": 0,
                    "layers": set(),
                    "tree": formula.tree(saving.bytes),
                },
            )
            group["count"] += 1
            group["layers"] |= {saving.layer} - {None}
        return [{**group, "layers": spans(group["layers"])} for group in groups.values()]

    def _second_choices(self) -> list[int]:
        """The indices in `ops` for which a preferred kernel refused the arguments."""
        found = []
        for number, row in enumerate(self.ops):
            ran = {name for kernel, _ in row["runs"] for name in (kernel, another_kernel(kernel))}
            row["rather"] = [
                (provider, reason)
                for provider, reason in row["refused"]
                if provider not in {*self.not_here, *ran}
                and (provider, reason) not in row["anywhere"]
            ]
            if row["rather"]:
                found.append(number)
        return found


# ---- layers x rewrites


class Grid:
    """Rewrites (rows) by layers (columns): consecutive equal layers share a column; the last column
    is outside of layers.

    reasons  the text of each cell; a cell has the index of its text
    absent   rows of rewrites whose pattern does not occur; there: all other rows
    """

    def __init__(self, report: ReportData):
        self.report = report
        self.reasons: list[list[Entry]] = []
        names = [
            name
            for name in dict.fromkeys([*report.known, *report.off, *report.matches])
            if name not in (*NOT_REWRITES, *report.optional) and "[" not in name
        ]
        self.sites: dict[tuple[str, int | None], list[Site]] = {}
        self.near: dict[tuple[str, int | None], list[Miss]] = {}
        for site in report.sites:
            self.sites.setdefault((site.rewrite, site.layer), []).append(site)
        for miss in report.near:
            self.near.setdefault((miss.rewrite, miss.layer), []).append(miss)
        self.columns = self._columns(names)
        self.prefix = _layer_prefixes(report)
        self.rows = sorted(map(self._row, names), key=_most_telling)
        self.absent = [
            row for row in self.rows if all(cell["state"] == "absent" for cell in row["cells"])
        ]
        self.there = [row for row in self.rows if row not in self.absent]

    def _columns(self, names: Sequence[str]) -> list[list[int | None]]:
        layers: list[int | None] = [*self.report.layers, None]
        looks = {layer: tuple(self._look(name, layer) for name in names) for layer in layers}
        return [
            list(run)
            for _, run in itertools.groupby(layers, key=lambda layer: (layer is None, looks[layer]))
        ]

    def title(self, column: Sequence[int | None]) -> str:
        return (
            "elsewhere"
            if column[0] is None
            else spans(layer for layer in column if layer is not None)
        )

    def heading(self, number: int) -> str:
        """The title of a column for use in a sentence."""
        title = self.title(self.columns[number])
        return (
            "outside of the layers"
            if title == "elsewhere"
            else f"layer{'s' * (len(self.columns[number]) > 1)} {title}"
        )

    def _look(self, name: str, layer: int | None) -> tuple[int, int]:
        return len(self.sites.get((name, layer), [])), len(self.near.get((name, layer), []))

    def _row(self, name: str) -> GridRow:
        about = self.report.about.get(name, "").partition("\n")[0]
        return {
            "name": name,
            "about": about,
            "cells": [self._cell(name, column) for column in self.columns],
            "total": self.report.matches[name],
        }

    def _cell(self, name: str, column: list[int | None]) -> Cell:
        sites = [site for layer in column for site in self.sites.get((name, layer), [])]
        near = [miss for layer in column for miss in self.near.get((name, layer), [])]
        state = (
            "near" if near else "fired" if sites else "off" if name in self.report.off else "absent"
        )
        lines = [*_near_lines(near), *_site_lines(sites)] or [
            ("why not", self._why_not(name, column))
        ]
        if sites:
            lines += self._kernel_lines(name)
        self.reasons.append(lines)
        number = len(near) or len(sites)
        return {"state": state, "number": number, "reason": len(self.reasons) - 1}

    def _why_not(self, name: str, column: list[int | None]) -> str:
        prefix = self.prefix.get(column[0])
        if self.report.treated and self.report.matches[name] and not prefix:
            return "its pattern does not occur outside of the layers"
        try:
            return self.report.reason(name, prefix)
        except ValueError as error:  # a report of a version with other rewrites
            return str(error)

    def _kernel_lines(self, name: str) -> list[Entry]:
        choices = [choice for choice in self.report.kernels if choice.op == name]
        runs = (
            _runs(list(dict.fromkeys((choice.tokens, choice.chosen) for choice in choices)))
            if choices
            else []
        )
        refused = dict.fromkeys(other for choice in choices for other in choice.others)
        return [
            *(
                ("runs as", f"{kernel} for {tokens}" if tokens else kernel)
                for kernel, tokens in runs
            ),
            *((f"not {provider}", reason) for provider, reason in refused),
        ]


def _most_telling(row: GridRow) -> int:
    """Rows with near misses first, then those that fired."""
    return min({"near": 0, "fired": 1}.get(cell["state"], 2) for cell in row["cells"])


def _layer_prefixes(report: ReportData) -> dict[int | None, str]:
    """The module path of each layer."""
    found: dict[int | None, str] = {}
    for cost in report.costs:
        path = re.match(r"(?:.*?\.)?\d+(?=\.|$)", cost.module_path)
        if cost.layer is not None and path:
            found.setdefault(cost.layer, path[0])
    return found


def _site_lines(sites: Iterable[Site]) -> list[Entry]:
    found: Counter[str] = Counter()
    for site in sites:
        attributes = ", ".join(f"{name}={value}" for name, value in site.attrs.items())
        found[
            _location(site.module_path, site.source) + (f": {attributes}" if attributes else "")
        ] += 1
    return [("fired", f"{_times(count)} {line}") for line, count in found.items()]


def _near_lines(near: Iterable[Miss]) -> list[Entry]:
    found: dict[tuple[str, str, str], list[Miss]] = {}
    for miss in near:
        found.setdefault(
            (_location(miss.module_path, miss.source), miss.expected, miss.found), []
        ).append(miss)
    return [
        said
        for (place, expected, what), misses in found.items()
        for said in (
            (
                "near miss",
                f"{_times(len(misses))} {place}: {misses[0].depth:.0%} of the pattern matched",
            ),
            ("expected", expected),
            ("found", what),
        )
    ]


def _location(path: str, source: str) -> str:
    return f"in {collapsed(path) or 'the graph'}" + (f" ({source})" if source else "")


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


# ---- kernels and where they come from


def _computed(row: OpRow) -> dict[str, JSONLike]:
    """The data to compute the time of an op. runs: (first, last number of tokens, op and kernel of
    the table row).
    """
    runs = row["ranges"] or [(GLUE, ALL_TOKENS)]
    ranges = [
        (tokens.first, tokens.last, *name_in_table(row["op"], kernel)) for kernel, tokens in runs
    ]
    return {
        "count": row["count"],
        "bytes": row["trees"][0],
        "flops": row["trees"][1],
        "runs": ranges,
        "rate": row["rate"],
    }


def _runs(runs: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """(kernel, range of tokens); one entry without a range if a kernel runs all of them."""
    if len({chosen for _, chosen in runs}) == 1:
        return [(runs[0][1], "")]
    return [(chosen, "" if tokens == "any" else f"{tokens} tokens") for tokens, chosen in runs]


def _ranges(runs: Sequence[tuple[str, str]]) -> list[tuple[str, Tokens]]:
    """As `_runs`, with ranges as Tokens."""
    if len({chosen for _, chosen in runs}) == 1:
        return [(runs[0][1], ALL_TOKENS)]
    return [(chosen, Tokens.of(tokens)) for tokens, chosen in runs]


def _unavailable_providers(choices: Sequence[KernelChoice]) -> set[str]:
    """Providers without a selected kernel, of which a kernel was refused because of the machine."""
    missing = {provider for choice in choices for provider, _ in choice.refused_by(*MACHINE_CODES)}
    return missing - {choice.chosen for choice in choices}


def _origins(cost: OpCost, captured: Mapping[str, NodeLine]) -> list[NodeLine]:
    return [captured[name] for name in cost.made_of if name in captured]


def _quantized_weights(
    report: ReportData, choices: Mapping[str, Sequence[KernelChoice]]
) -> list[dict[str, Any]]:
    groups: dict[Hashable, dict[str, Any]] = {}
    for found in report.few_bits:
        runs = tuple(
            dict.fromkeys((choice.tokens, choice.chosen) for choice in choices.get(found.node, []))
        )
        key = (found.op, found.scheme, collapsed(found.module_path), runs)
        group = groups.setdefault(
            key,
            {
                "op": found.op,
                "scheme": found.scheme,
                "path": key[2],
                "runs": _runs(runs),
                "count": 0,
                "bytes": 0,
                "saved": 0,
            },
        )
        group["count"] += 1
        group["bytes"] += found.bytes
        group["saved"] += found.full_bytes - found.bytes
    return [
        {**group, "share": group["saved"] / (group["saved"] + group["bytes"])}
        for group in groups.values()
    ]


def _moe_layers(
    report: ReportData, choices: Mapping[str, Sequence[KernelChoice]]
) -> list[dict[str, Any]]:
    """Equal mixtures of experts in one row."""
    groups: dict[tuple[MoeLayer, tuple[tuple[str, str], ...]], list[MoeLayer]] = {}
    for found in report.moe:
        chosen = tuple(kernels_by_tokens(choices.get(found.node, [])))
        path = collapsed(found.module_path)
        key = replace(found, module_path=path, layer=None, node=""), chosen
        groups.setdefault(key, []).append(found)
    return [
        {
            **asdict(layers[0]),
            "path": collapsed(layers[0].module_path),
            "layers": spans(found.layer for found in layers if found.layer is not None),
            "bytes": sum(found.bytes for found in layers),
            "runs": [
                (name, "" if tokens == "any" else f"{tokens} tokens") for tokens, name in chosen
            ],
        }
        for (_, chosen), layers in groups.items()
    ]


# ---- passes


def _passes(report: ReportData) -> list[dict[str, Any]]:
    """The changes of each pass, side by side."""
    found, last = [], ""
    for stage in report.stages:
        before = stage.before or last
        changed: list[Hunk] = (
            hunks(parse(before), parse(stage.text)) if before and stage.text else []
        )
        found.append(
            {
                "name": stage.name,
                "changed": stage.changed,
                "hunks": changed[:MAX_HUNKS],
                "more": len(changed[MAX_HUNKS:]),
                "kept": bool(before and stage.text),
                "about": report.about.get(stage.name, "").partition("\n")[0],
            }
        )
        last = stage.text or last
    shown = (step for step in found if step["hunks"] and step["about"] and step["name"] != "lift")
    first = next(shown, None)
    return [
        {**step, "first": step is first, "number": number}
        for number, step in enumerate(found, start=1)
    ]


def _captured(report: ReportData) -> list[NodeLine]:
    """The functional graph before all passes (not Dynamo's graph, which only lifting changes)."""
    stages = [stage for stage in report.stages if stage.name != "lift"]
    return parse(next((stage.before for stage in stages if stage.before), ""))


def _final(report: ReportData) -> list[NodeLine]:
    return (
        parse(report.stages[-1].text) if report.stages and report.stages[-1].name != "lift" else []
    )
