"""Compares the reports of two graphs: two models, or one model compiled twice."""

from collections import Counter
from collections.abc import Callable, Sequence

from atomc.report.records import counted
from atomc.report.render import formula
from atomc.report.render.table import WIDTH, format_bytes, table
from atomc.report.render.text import NOT_REWRITES
from atomc.report.report_data import ReportData

# The steps that are compared: tokens, sequences, rows of logits and context.
DECODE = {"T": 1, "S": 1, "R": 1, "C": 1024}
PREFILL = {"T": 1024, "S": 1, "R": 1, "C": 1024}

LESS_OFTEN = "its pattern occurs less often"

Row = tuple[str, str, str, str]


class Comparison:
    """The differences of two reports, as rows of (name, first, second, reason)."""

    def __init__(
        self, first: ReportData, second: ReportData, names: tuple[str, str] = ("first", "second")
    ):
        self.first, self.second, self.names = first, second, names

    @property
    def rewrites(self) -> list[Row]:
        """The number of sites of each rewrite, and why it fired less often in one of the graphs."""
        rows = []
        for name in dict.fromkeys([*self.first.known, *self.second.known]):
            a, b = self.first.matches[name], self.second.matches[name]
            if (a or b) and name not in NOT_REWRITES:
                fewer = self.first if a < b else self.second
                rows.append((name, str(a), str(b), "" if a == b else _why_fewer(fewer, name)))
        return rows

    @property
    def kernels(self) -> list[Row]:
        """The kernels of each op."""
        a, b = _kernels(self.first), _kernels(self.second)
        return [
            (op, counted(a.get(op, {})) or "-", counted(b.get(op, {})) or "-", "")
            for op in dict.fromkeys([*a, *b])
        ]

    @property
    def near(self) -> list[Row]:
        """The number of near misses of each rewrite."""
        counts = [
            Counter(miss.rewrite for miss in report.near) for report in (self.first, self.second)
        ]
        return [
            (name, str(counts[0][name]), str(counts[1][name]), "")
            for name in dict.fromkeys([*counts[0], *counts[1]])
        ]

    @property
    def facts(self) -> list[Row]:
        """Model, layers, costs, compile time and cache."""

        def row(name: str, read: Callable[[ReportData], str]) -> Row:
            return name, read(self.first), read(self.second), ""

        return [
            row("model", lambda r: r.model),
            row("treated", lambda r: "yes" if r.treated else f"no: {r.why_not}"),
            row("layers", lambda r: str(r.num_layers)),
            row("kernels a call", lambda r: str(len(r.costs))),
            row("bytes of a decode step", lambda r: _bytes_moved(r, DECODE)),
            row("bytes of a prompt of 1024", lambda r: _bytes_moved(r, PREFILL)),
            row("near misses", lambda r: str(len(r.near))),
            row("seconds to compile", lambda r: f"{sum(r.phases.values()):.2f}"),
            row("cache", lambda r: r.cache or "off"),
        ]

    def to_text(self) -> str:
        """Tables for a terminal, with * for differences."""
        header = ("", *self.names)
        parts = []
        for title, rows in (
            ("", self.facts),
            ("rewrite", self.rewrites),
            ("near misses", self.near),
            ("op", self.kernels),
        ):
            lines = [
                (f"{'*' if a != b else ' '} {name}", _truncated(a), b) for name, a, b, _ in rows
            ]
            if lines:
                parts.append(table((f"  {title}", *header[1:]), lines))
        why = [
            f"{name}: {reason}"
            for name, _, _, reason in self.rewrites
            if reason not in ("", LESS_OFTEN)
        ]
        return (
            "\n\n".join(
                [*parts, *(["why fewer\n" + "\n".join(f"  {line}" for line in why)] if why else [])]
            )
            + "\n"
        )


def comparison_text(
    first: Sequence[ReportData], second: Sequence[ReportData], names: tuple[str, str]
) -> str:
    """The comparison of each pair of graphs, in order."""
    texts = [Comparison(a, b, names).to_text() for a, b in zip(first, second, strict=False)]
    if len(first) != len(second):
        texts.append(f"{names[0]} has {len(first)} graphs, {names[1]} has {len(second)}\n")
    return "\n".join(
        f"graph {i}\n{text}" if len(texts) > 1 else text for i, text in enumerate(texts)
    )


def _truncated(text: str) -> str:
    most = WIDTH // 2 - 4
    return text if len(text) <= most else text[: most - 3] + "..."


def _why_fewer(report: ReportData, name: str) -> str:
    exists = name in (*report.known, *report.off)
    return (
        report.reason(name)
        if exists and not report.matches[name]
        else _near_miss_reason(report, name)
    )


def _near_miss_reason(report: ReportData, name: str) -> str:
    near = [miss for miss in report.near if miss.rewrite == name]
    return near[0].text() if near else LESS_OFTEN


def _kernels(report: ReportData) -> dict[str, Counter[str]]:
    by_op: dict[str, Counter[str]] = {}
    for choice in report.kernels:
        tokens = "" if choice.tokens == "any" else f" for {choice.tokens} tokens"
        by_op.setdefault(choice.op, Counter())[choice.chosen + tokens] += 1
    return by_op


def _bytes_moved(report: ReportData, sizes: dict[str, int]) -> str:
    """Bytes moved for these sizes; other sizes of the graph are set to the number of tokens."""
    total = 0.0
    for cost in report.costs:
        tree = formula.tree(cost.bytes)
        if tree is None:
            return "unknown"
        total += formula.evaluated(tree, dict.fromkeys(formula.names_in(tree), sizes["T"]) | sizes)
    return format_bytes(total)
