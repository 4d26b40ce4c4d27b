"""Predicts the time of a kernel: launch floor + max(bytes / bandwidth, flops / peak) / efficiency.

Efficiencies are measured per machine, op, kernel and range of tokens: `efficiency.json` contains
the shipped tables, `python bench/efficiency.py` measures one. Without a measurement, an efficiency
of 1 gives a lower bound.
"""

import functools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import sympy

from atomc.ops.op import REGISTRY
from atomc.platform import Platform
from atomc.report.kernel_ranges import choices_by_op
from atomc.report.records import KernelChoice, OpCost, grouped_by
from atomc.token_range import Tokens

SHIPPED = Path(__file__).with_suffix(".json")
VERSION = 1
# Seconds: the shortest kernel inside a CUDA graph, NVIDIA H200, bench/results/kernels-h200.txt.
LAUNCH = 0.75e-6
GLUE = "glue"


@dataclass(frozen=True)
class Timing:
    """One measured call. work: seconds by the roofline of the data sheet, max(bytes / bandwidth,
    flops / peak).
    """

    op: str
    kernel: str
    tokens: int
    work: float
    seconds: float


@dataclass(frozen=True)
class Row:
    """The measured efficiency of a kernel for `first` to `last` tokens per step. points: the number
    of measured calls.
    """

    op: str
    kernel: str
    first: int
    last: int | None
    floor: float
    efficiency: float
    points: int

    def seconds(self, work: float) -> float:
        return self.floor + work / self.efficiency


@dataclass(frozen=True)
class Table:
    """The rows of one machine. Efficiencies refer to its bandwidth (bytes/s) and flops (1/s)."""

    machine: str
    bandwidth: float
    flops: float
    source: str
    rows: tuple[Row, ...]

    def row(self, op: str, kernel: str, tokens: int) -> Row | None:
        """The measured row; None if this kernel was not measured."""
        of_kernel = [row for row in self.rows if (row.op, row.kernel) == (op, kernel)]
        return next(
            (
                row
                for row in of_kernel
                if row.first <= tokens and (row.last is None or tokens <= row.last)
            ),
            None,
        )

    def over(self, older: "Table") -> "Table":
        """This table, with the older table's rows for kernels that it lacks."""
        kernels = {(row.op, row.kernel) for row in self.rows}
        left = tuple(row for row in older.rows if (row.op, row.kernel) not in kernels)
        return (
            replace(self, rows=self.rows + left, source=f"{self.source}; rest: {older.source}")
            if left
            else self
        )

    def to_dict(self) -> dict[str, Any]:
        return {"version": VERSION, **asdict(self)}

    @staticmethod
    def of(data: Mapping[str, Any]) -> "Table":
        """The table of `to_dict` data. Raises ValueError for other data or another version."""
        try:
            if data["version"] != VERSION:
                raise ValueError(
                    f"the table is of version {data['version']!r}, expected {VERSION}: measure "
                    "again"
                )
            rows = tuple(Row(**row) for row in data["rows"])
            return Table(data["machine"], data["bandwidth"], data["flops"], data["source"], rows)
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"not a table of efficiencies: {error}; bench/efficiency.py writes one"
            ) from error


def tables(file: Path) -> dict[str, Table]:
    """The tables in a file, by machine name. Raises ValueError for a file of another format."""
    try:
        all_tables = [Table.of(table) for table in json.loads(file.read_text())]
    except (json.JSONDecodeError, TypeError) as error:
        raise ValueError(f"{file} is not a table of efficiencies: {error}") from error
    return {table.machine: table for table in all_tables}


@functools.cache
def shipped() -> dict[str, Table]:
    """The tables in the package."""
    return tables(SHIPPED)


def table_for(platform: Platform) -> Table | None:
    """The shipped table of this machine, if any."""
    return shipped().get(platform.name)


@dataclass(frozen=True)
class Predicted:
    """The predicted cost of one kernel in a step.

    kernel    the provider that runs it; "inline" and "glue": the glue compiler or eager PyTorch
    least     seconds by the data sheet; None without a bandwidth
    seconds   predicted; None for a machine with neither a bandwidth nor a table
    measured  whether the table has this kernel; else `seconds` is a lower bound
    rate      of its matrix products, relative to the bf16 peak
    sent      bytes to other processes, whose time is a part of `least`
    """

    op: str
    kernel: str
    module_path: str
    layer: int | None
    bytes: float
    flops: float
    least: float | None
    seconds: float | None
    measured: bool
    nodes: tuple[str, ...] = ()
    rate: int = 1
    sent: float = 0.0


def predict(
    costs: Iterable[OpCost],
    choices: Sequence[KernelChoice],
    platform: Platform,
    sizes: Mapping[str, int],
    table: Table | None = None,
) -> list[Predicted]:
    """The time of each kernel in a step of these sizes: T tokens, R rows of logits, S sequences, C
    tokens of context; N processes, of which there is one if it is not given.

    costs, choices  of a report: its costs and its kernels

    Raises ValueError naming other sizes of the graph.
    """
    of_op = choices_by_op(choice for choice in choices if sizes["T"] in Tokens.of(choice.tokens))
    return [_predicted(cost, of_op(cost), platform, sizes, table) for cost in costs]


def _predicted(
    cost: OpCost,
    choices: Sequence[KernelChoice],
    platform: Platform,
    sizes: Mapping[str, int],
    table: Table | None,
) -> Predicted:
    moved, flops, sent = (
        evaluated(formula, tuple(sorted({"N": 1, **sizes}.items())))
        for formula in (cost.bytes, cost.flops, cost.sent)
    )
    kernel = next((choice.chosen for choice in choices), GLUE)
    least = work(platform, cost.rate, moved, flops, table)
    if least is not None and platform.link:
        least += sent / platform.link
    row = table.row(*name_in_table(cost.op, kernel), sizes["T"]) if table else None
    floor = LAUNCH if platform.device == "cuda" else 0.0
    seconds = None if least is None else row.seconds(least) if row else floor + least
    return Predicted(
        cost.op,
        kernel,
        cost.module_path,
        cost.layer,
        moved,
        flops,
        least,
        seconds,
        row is not None,
        tuple(cost.nodes),
        cost.rate,
        sent,
    )


def name_in_table(op: str, kernel: str) -> tuple[str, str]:
    """The (op, kernel) of a table row: nodes without a kernel of ours share one entry."""
    return (op, kernel) if op in REGISTRY and kernel != "inline" else (GLUE, GLUE)


def work(
    platform: Platform, rate: int, moved: float, flops: float, table: Table | None = None
) -> float | None:
    """Seconds by the roofline of the machine's bandwidth and of its bf16 peak times the rate of the
    products; None without a bandwidth.
    """
    bandwidth, peak = (
        (table.bandwidth, table.flops) if table else (platform.bandwidth, platform.flops)
    )
    if bandwidth is None:
        return None
    return max(moved / bandwidth, flops / (peak * rate) if peak else 0.0)


@functools.lru_cache(maxsize=4096)
def evaluated(formula: str, sizes: tuple[tuple[str, int], ...]) -> float:
    """The value of a formula of a report. Raises ValueError naming missing sizes."""
    symbols = {name: sympy.Symbol(name) for name in "TRSCN"}
    result = sympy.sympify(formula, locals=symbols).subs(
        {symbols[name]: size for name, size in sizes}
    )
    if result.free_symbols:
        raise ValueError(
            f"the graph has sizes {sorted(map(str, result.free_symbols))} that a step does not "
            "define; "
            "a plan needs a model compiled for the runtime"
        )
    return float(result)


def fit(
    timings: Iterable[Timing], machine: str, bandwidth: float, flops: float, source: str
) -> Table:
    """A row for each op, kernel and measured number of tokens; ranges are split at the geometric
    mean of two numbers.
    """
    groups = grouped_by(lambda timing: (timing.op, timing.kernel), timings)
    rows = []
    for op, kernel in sorted(groups):
        by_tokens = grouped_by(lambda timing: timing.tokens, groups[op, kernel])
        measured = sorted(by_tokens)
        for (first, last), tokens in zip(_ranges(measured), measured, strict=True):
            points = by_tokens[tokens]
            floor, efficiency = _line([(point.work, point.seconds) for point in points])
            rows.append(Row(op, kernel, first, last, floor, efficiency, len(points)))
    return Table(machine, bandwidth, flops, source, tuple(rows))


def _ranges(tokens: Sequence[int]) -> list[tuple[int, int | None]]:
    middles = [math.isqrt(a * b) for a, b in pairwise(tokens)]
    return list(zip([1, *(middle + 1 for middle in middles)], [*middles, None], strict=True))


def _line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(floor, efficiency) with the least squared relative errors of floor + work / efficiency.

    The floor is at least 0, and the efficiency at most 1: data in a cache may exceed the bandwidth
    of the memory.
    """
    n = sum(1 / t**2 for _, t in points)
    w, ww = sum(w / t**2 for w, t in points), sum(w * w / t**2 for w, t in points)
    t, wt = sum(1 / t for _, t in points), sum(w / t for w, t in points)
    determinant = n * ww - w * w
    # Points of one size do not determine a slope: use the launch floor.
    collinear = determinant <= 1e-9 * n * ww
    slope = (n * wt - w * t) / determinant if not collinear else (t - LAUNCH * n) / w if w else 1.0
    slope = max(slope, 1.0)
    floor = (t - slope * w) / n
    if floor < 0:
        floor, slope = 0.0, max(wt / ww, 1.0)
    return floor, 1 / slope
