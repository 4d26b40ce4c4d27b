"""A report as one HTML file that needs no network: what the compiler did, pass by pass, layer by layer, op by op."""

import difflib
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import sympy
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from sympy.printing.jscode import jscode

from atomc.render.text import NOT_REWRITES, collapsed
from atomc.report import spans

HERE = Path(__file__).parent
CONTEXT_LINES = 1

Data = Mapping[str, Any]


def page(reports: Sequence[Data]) -> str:
    """The HTML of reports as `Report.to_dict` gives them, one tab a graph. Escapes all names that models bring."""
    environment = Environment(loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined,
                              trim_blocks=True, lstrip_blocks=True)  # fmt: skip
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    return environment.get_template("report.html").render(
        graphs=[_graph(number, report) for number, report in enumerate(reports)],
        style=(HERE / "report.css").read_text(),
        script=(HERE / "report.js").read_text(),
    )


def _graph(number: int, report: Data) -> dict[str, Any]:
    """One graph as the template wants it."""
    return {
        "id": f"graph-{number}",
        "title": report["model"],
        "report": report,
        "counts": _counts(report),
        "grid": _grid(report),
        "passes": _passes(report["stages"]),
        "kernels": _kernels(report["kernels"]),
        "cost": _cost(report),
        "phases": _phases(report["phases"]),
        "notes": list(report["notes"]),
        "final": report["stages"][-1]["text"] if report["stages"] else "",
    }


def _counts(report: Data) -> list[tuple[str, int]]:
    names = [name for name in dict.fromkeys(report["known"]) if name not in NOT_REWRITES]
    return [(name, report["matches"][name]) for name in names if report["matches"].get(name)]


# ---- layers x rewrites


def _grid(report: Data) -> dict[str, Any]:
    """A row per rewrite that fired or nearly did, a column per layer; -1 is what lies outside of layers."""
    cells: dict[tuple[str, int], dict[str, Any]] = {}

    def cell(rewrite: str, layer: int | None) -> dict[str, Any]:
        return cells.setdefault((rewrite, -1 if layer is None else layer), {"fired": [], "near": []})

    for site in report["sites"]:
        if site["rewrite"] not in NOT_REWRITES:
            attributes = ", ".join(f"{name}={value}" for name, value in site["attrs"].items())
            cell(site["rewrite"], site["layer"])["fired"].append([site["module_path"], site["source"], attributes])
    for miss in report["near"]:
        cell(miss["rewrite"], miss["layer"])["near"].append(
            [miss["module_path"], miss["source"], f"{miss['depth']:.0%}", miss["expected"], miss["found"]])  # fmt: skip
    layers = sorted({layer for _, layer in cells} | {cost["layer"] for cost in report["costs"] if cost["layer"] is not None})
    order = {name: i for i, name in enumerate(dict.fromkeys([*report["known"], *report["matches"]]))}
    rows = sorted({rewrite for rewrite, _ in cells}, key=lambda name: order.get(name, len(order)))
    absent = {**report["absent"], **report["taken"], **dict.fromkeys(report["off"], "the pass is off")}
    return {
        "layers": layers,
        "rows": [{"name": name, "cells": [cells.get((name, layer)) for layer in layers]} for name in rows],
        "absent": [(name, why) for name, why in absent.items() if name not in rows and name not in NOT_REWRITES],
    }


# ---- passes


def _passes(stages: Sequence[Data]) -> list[dict[str, Any]]:
    """What each pass changed, side by side; hunks that differ by numbers only are shown once."""
    found, before = [], ""
    for stage in stages:
        if not stage["text"]:
            found.append({"name": stage["name"], "changed": stage["changed"], "hunks": []})
            continue
        hunks = _hunks(before.splitlines(), stage["text"].splitlines()) if before else []
        found.append({"name": stage["name"], "changed": stage["changed"], "hunks": hunks})
        before = stage["text"]
    return found


def _hunks(before: list[str], after: list[str]) -> list[dict[str, Any]]:
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    groups: dict[str, dict[str, Any]] = {}
    for tag, a, b, c, d in matcher.get_opcodes():
        if tag == "equal":
            continue
        key = re.sub(r"\d+", "#", "\n".join([*before[a:b], "->", *after[c:d]]))
        hunk = groups.setdefault(key, {"count": 0, "layers": set(), "rows": _rows(before, after, a, b, c, d)})
        hunk["count"] += 1
        hunk["layers"] |= {int(number) for line in (*before[a:b], *after[c:d])
                           for number in re.findall(r"\.(\d+)(?:\.|$)", line)}  # fmt: skip
    return [{**hunk, "layers": spans(hunk["layers"])} for hunk in groups.values()]


def _rows(before: list[str], after: list[str], a: int, b: int, c: int, d: int) -> list[tuple[str, str, str]]:
    """(kind, left, right): what stands around is "same"."""
    rows = [("same", line, line) for line in before[max(a - CONTEXT_LINES, 0):a]]
    for i in range(max(b - a, d - c)):
        left, right = (before[a + i] if a + i < b else ""), (after[c + i] if c + i < d else "")
        rows.append(("changed" if left and right else "gone" if left else "made", left, right))
    return rows + [("same", line, line) for line in before[b:b + CONTEXT_LINES]]


# ---- kernels


def _kernels(choices: Sequence[Data]) -> list[dict[str, Any]]:
    """Ops that run alike, together: how many, where, what was refused and why."""
    groups: dict[Any, dict[str, Any]] = {}
    for choice in choices:
        refused = tuple((provider, reason) for provider, reason in choice["refused"])
        key = (choice["op"], choice["tokens"], choice["chosen"], refused)
        group = groups.setdefault(key, {"op": choice["op"], "tokens": choice["tokens"], "chosen": choice["chosen"],
                                        "refused": refused, "modules": Counter()})  # fmt: skip
        group["modules"][collapsed(choice["module_path"]) or "the graph"] += 1
    return [{**group, "count": sum(group["modules"].values())} for group in groups.values()]


# ---- cost


def _cost(report: Data) -> dict[str, Any]:
    """Formulas for the browser, those of equal layers once: it evaluates them for the numbers on its sliders."""
    groups: dict[Any, dict[str, Any]] = {}
    for cost in report["costs"]:
        key = (cost["op"], collapsed(cost["module_path"]), cost["bytes"], cost["flops"])
        group = groups.setdefault(key, {"op": cost["op"], "path": collapsed(cost["module_path"]), "count": 0,
                                        "bytes": cost["bytes"], "flops": cost["flops"]})  # fmt: skip
        group["count"] += 1
    rows = [{**group, "bytes_js": _js(group["bytes"]), "flops_js": _js(group["flops"])} for group in groups.values()]
    symbols = sorted({symbol for row in rows for symbol in row["bytes_js"][1] | row["flops_js"][1]})
    data = [[row["count"], row["bytes_js"][0], row["flops_js"][0]] for row in rows]
    return {"rows": rows, "symbols": symbols, "is_step": "T" in symbols, "script": json.dumps(data),
            "machine": dict(report["machine"])}  # fmt: skip


def _js(formula: str) -> tuple[str, set[str]]:
    """A formula of sympy as JavaScript, and the names in it. Only what sympy prints gets into the page."""
    names = set(re.findall(r"[A-Za-z_]\w*", formula)) - {"Min", "Max"}
    expr = sympy.sympify(formula, locals={name: sympy.Symbol(name) for name in names})
    return str(jscode(expr)), names


def _phases(phases: Mapping[str, float]) -> list[tuple[str, float, float]]:
    whole = sum(phases.values()) or 1.0
    return [(name, seconds, seconds / whole * 100) for name, seconds in phases.items()]


