"""The table of rewrites by layers in the HTML report."""

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TypedDict

from atomc.report.records import Miss, Site, grouped_by, located, spans
from atomc.report.render.first_sentence import first_sentence
from atomc.report.render.kernel_rows import Entry, kernel_runs, runs_of
from atomc.report.render.table import collapsed
from atomc.report.render.text import NOT_REWRITES
from atomc.report.report_data import ReportData


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
        self.sites = grouped_by(lambda site: (site.rewrite, site.layer), report.sites)
        self.near = grouped_by(lambda miss: (miss.rewrite, miss.layer), report.near)
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
        about = first_sentence(self.report.about.get(name, ""))
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
        runs = kernel_runs(runs_of(choices)) if choices else []
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
    prefixes: dict[int | None, str] = {}
    for cost in report.costs:
        path = re.match(r"(?:.*?\.)?\d+(?=\.|$)", cost.module_path)
        if cost.layer is not None and path:
            prefixes.setdefault(cost.layer, path[0])
    return prefixes


def _site_lines(sites: Iterable[Site]) -> list[Entry]:
    counts: Counter[str] = Counter()
    for site in sites:
        attributes = ", ".join(f"{name}={value}" for name, value in site.attrs.items())
        counts[
            _location(site.module_path, site.source) + (f": {attributes}" if attributes else "")
        ] += 1
    return [("fired", f"{_times(count)} {line}") for line, count in counts.items()]


def _near_lines(near: Iterable[Miss]) -> list[Entry]:
    by_text = grouped_by(
        lambda miss: (_location(miss.module_path, miss.source), miss.expected, miss.found), near
    )
    return [
        said
        for (place, expected, what), misses in by_text.items()
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
    return f"in {located(collapsed(path), source)}"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
