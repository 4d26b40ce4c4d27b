"""Rows of the HTML report about kernels: what runs each op, quantized weights, experts."""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, TypedDict

from atomc.cost.efficiency import GLUE, name_in_table
from atomc.files.json_types import JSONLike
from atomc.graph.graph_printer import NodeLine
from atomc.report.kernel_ranges import kernels_by_tokens
from atomc.report.records import KernelChoice, MoeLayer, OpCost, grouped_by, spans
from atomc.report.render import formula
from atomc.report.render.table import collapsed
from atomc.report.report_data import ReportData
from atomc.token_range import ALL_TOKENS, Tokens

# Codes of refusals that do not depend on the op's arguments: by the machine, and by design.
MACHINE_CODES = ("hardware", "library")
DESIGN_CODES = ("tokens", "slower")

Entry = tuple[str, str]  # (label, text)


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


def computed(row: OpRow) -> dict[str, JSONLike]:
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


def runs_of(choices: Iterable[KernelChoice]) -> list[tuple[str, str]]:
    """(range of tokens, kernel) of these choices, each once."""
    return list(dict.fromkeys((choice.tokens, choice.chosen) for choice in choices))


def kernel_runs(runs: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """(kernel, range of tokens); one entry without a range if a kernel runs all of them."""
    if len({kernel for _, kernel in runs}) == 1:
        return [(runs[0][1], "")]
    return [(kernel, "" if tokens == "any" else f"{tokens} tokens") for tokens, kernel in runs]


def token_ranges(runs: Sequence[tuple[str, str]]) -> list[tuple[str, Tokens]]:
    """As `kernel_runs`, with ranges as Tokens."""
    if len({kernel for _, kernel in runs}) == 1:
        return [(runs[0][1], ALL_TOKENS)]
    return [(kernel, Tokens.of(tokens)) for tokens, kernel in runs]


def unavailable_providers(choices: Sequence[KernelChoice]) -> set[str]:
    """Providers without a selected kernel, of which a kernel was refused because of the machine."""
    missing = {provider for choice in choices for provider, _ in choice.refused_by(*MACHINE_CODES)}
    return missing - {choice.chosen for choice in choices}


def origins(cost: OpCost, captured: Mapping[str, NodeLine]) -> list[NodeLine]:
    return [captured[name] for name in cost.made_of if name in captured]


def quantized_weights(
    report: ReportData, choices: Mapping[str, Sequence[KernelChoice]]
) -> list[dict[str, Any]]:
    groups: dict[Hashable, dict[str, Any]] = {}
    for weight in report.few_bits:
        runs = tuple(runs_of(choices.get(weight.node, [])))
        key = (weight.op, weight.scheme, collapsed(weight.module_path), runs)
        group = groups.setdefault(
            key,
            {
                "op": weight.op,
                "scheme": weight.scheme,
                "path": key[2],
                "runs": kernel_runs(runs),
                "count": 0,
                "bytes": 0,
                "saved": 0,
            },
        )
        group["count"] += 1
        group["bytes"] += weight.bytes
        group["saved"] += weight.full_bytes - weight.bytes
    return [
        {**group, "share": group["saved"] / (group["saved"] + group["bytes"])}
        for group in groups.values()
    ]


def moe_layers(
    report: ReportData, choices: Mapping[str, Sequence[KernelChoice]]
) -> list[dict[str, Any]]:
    """Equal mixtures of experts in one row."""

    def looks(layer: MoeLayer) -> tuple[MoeLayer, tuple[tuple[str, str], ...]]:
        path = collapsed(layer.module_path)
        ranges = tuple(kernels_by_tokens(choices.get(layer.node, [])))
        return replace(layer, module_path=path, layer=None, node=""), ranges

    return [
        {
            **asdict(layers[0]),
            "path": collapsed(layers[0].module_path),
            "layers": spans(layer.layer for layer in layers if layer.layer is not None),
            "bytes": sum(layer.bytes for layer in layers),
            "runs": [
                (name, "" if tokens == "any" else f"{tokens} tokens") for tokens, name in ranges
            ],
        }
        for (_, ranges), layers in grouped_by(looks, report.moe).items()
    ]
