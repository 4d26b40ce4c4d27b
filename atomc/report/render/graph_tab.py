"""The tab of one graph in the HTML report."""

from collections.abc import Hashable
from dataclasses import asdict, replace
from typing import Any

from atomc.files.json_types import JSONLike
from atomc.report.kernel_ranges import choices_by_op
from atomc.report.records import another_kernel, grouped_by, spans
from atomc.report.render import formula
from atomc.report.render.graph_diff import Block, fold_layers
from atomc.report.render.kernel_rows import (
    DESIGN_CODES,
    MACHINE_CODES,
    OpRow,
    computed,
    kernel_runs,
    moe_layers,
    origins,
    quantized_weights,
    runs_of,
    token_ranges,
    unavailable_providers,
)
from atomc.report.render.machines import machine_data
from atomc.report.render.pass_changes import captured_graph, final_graph, pass_changes
from atomc.report.render.rewrite_grid import Grid
from atomc.report.render.table import collapsed
from atomc.report.render.text import fired_counts
from atomc.report.report_data import ReportData


class Graph:
    """One graph, in the form that the template needs."""

    def __init__(self, number: int, report: ReportData, group: str = ""):
        self.report, self.id = report, f"g{number}"
        self.label = f"{group}: {report.title}" if group else report.title
        self.tab = f"{number}: {self.label}"
        self.captured, self.final = captured_graph(report), final_graph(report)
        self.choices = grouped_by(lambda choice: choice.node, report.kernels)
        self.not_here = unavailable_providers(report.kernels)
        self.ops = self._ops()
        self.grid = Grid(report)
        self.passes = pass_changes(report)
        self.savings = self._savings()
        self.second = self._second_choices()
        self.quantized_weights = quantized_weights(report, self.choices)
        self.moe_layers = moe_layers(report, self.choices)
        self.symbols = sorted(
            {name for row in self.ops for tree in row["trees"] for name in formula.names_in(tree)}
        )

    @property
    def machine(self) -> dict[str, JSONLike]:
        """The machine of the compile."""
        current = self.report.machine
        return machine_data(
            current.get("name", ""),
            current.get("bandwidth"),
            current.get("flops"),
            current.get("device", "cpu"),
        )

    @property
    def counts(self) -> list[tuple[str, int]]:
        return fired_counts(self.report)

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
        all_sections = [
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
        return [(name, title) for name, title, there in all_sections if there]

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
            "ops": [computed(row) for row in self.ops],
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
        of_op = choices_by_op(self.report.kernels)
        for cost in self.report.costs:
            choices = of_op(cost)
            runs = runs_of(choices)
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
                    "runs": kernel_runs(runs),
                    "ranges": token_ranges(runs),
                    "refused": refused,
                    "anywhere": anywhere,
                    "rather": [],
                    "bytes": cost.bytes,
                    "flops": cost.flops,
                    "rate": cost.rate,
                    "source": cost.source,
                    "trees": [formula.tree(cost.bytes), formula.tree(cost.flops)],
                    "nodes": len(cost.nodes),
                    "origins": origins(cost, origin),
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
        numbers = []
        for number, row in enumerate(self.ops):
            ran = {name for kernel, _ in row["runs"] for name in (kernel, another_kernel(kernel))}
            row["rather"] = [
                (provider, reason)
                for provider, reason in row["refused"]
                if provider not in {*self.not_here, *ran}
                and (provider, reason) not in row["anywhere"]
            ]
            if row["rather"]:
                numbers.append(number)
        return numbers
