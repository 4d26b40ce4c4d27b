"""Contracts on how often rewrites fire and which kernels run, checked when a graph is compiled.

    options={"expect": {"add_rms_norm": "2*layers", "qk_norm_rope": "layers"}, "expect_mode":
    "error"}

A count is a number or a formula of `layers`, the number of layers in the graph; ">= layers" is a
minimum. The counts of a saved report are compared with those of a later compile.
"""

import ast
import logging
import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from atomc.errors import ContractError, OptionsError, suggestion
from atomc.options import Options
from atomc.report.records import counted, spans
from atomc.report.report import Report, reports

log = logging.getLogger("atomc")

_BINARY: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}


def expected(rewrite: str, count: int | str, layers: int) -> tuple[int, bool]:
    """(expected number of sites in a graph with this many layers, whether it is a minimum).

    Raises OptionsError for a text that is not a formula.
    """
    text = str(count).strip()
    least = text.startswith(">=")
    try:
        return _number(ast.parse(text.removeprefix(">=").strip(), mode="eval").body, layers), least
    except (SyntaxError, ValueError, ZeroDivisionError) as error:
        raise OptionsError(
            f"option expect: the count {count!r} of {rewrite!r} is not valid ({error}): expected "
            "a number or a formula such as 'layers', '2*layers + 1', '>= layers'"
        ) from error


def _number(node: ast.expr, layers: int) -> int:
    match node:
        case ast.Constant(value=int(number)) if not isinstance(node.value, bool):
            return number
        case ast.Name(id="layers"):
            return layers
        case ast.BinOp() if type(node.op) in _BINARY:
            return _BINARY[type(node.op)](_number(node.left, layers), _number(node.right, layers))
    raise ValueError(f"{ast.unparse(node)!r} cannot be used")


def check_formulas(expect: Mapping[str, int | str]) -> None:
    """Raise OptionsError for a count that is neither a number nor a formula."""
    for rewrite, count in expect.items():
        expected(rewrite, count, layers=1)


def violations(report: Report, expect: Mapping[str, int | str]) -> list[str]:
    """The violations of a graph, one sentence each, with the layers and the reason.

    A part of a program between two graph breaks has no violations if it has no layers. Raises
    OptionsError for an unknown rewrite or a wrong formula.
    """
    counts = {
        rewrite: expected(rewrite, count, report.num_layers) for rewrite, count in expect.items()
    }
    if not report.treated:
        return (
            [f"{', '.join(expect)} expected, but the graph was not treated: {report.why_not}"]
            if expect
            else []
        )
    unknown = [
        name
        for name in expect
        if report.known and name not in (*report.known, *report.off, *report.matches)
    ]
    if unknown:
        raise OptionsError(
            f"option expect: no rewrite {unknown[0]!r}{suggestion(unknown[0], report.known)}; "
            f"rewrites are {', '.join(sorted(report.known))}"
        )
    if not report.num_layers and _is_part(report):
        return []
    return [
        _violation_text(report, name, number, least, str(expect[name]))
        for name, (number, least) in counts.items()
        if report.matches[name] < number or (report.matches[name] > number and not least)
    ]


def _is_part(report: Report) -> bool:
    """Whether the graph is one of several that a call of a compiled function made so far."""
    earlier = any(other.call == report.call and other is not report for other in reports())
    return bool(report.graph_break or report.continues or (report.call and earlier))


def _violation_text(report: Report, rewrite: str, number: int, least: bool, formula: str) -> str:
    expected_text = f"{'at least ' * least}{number}"
    expected_text += f" ({formula.removeprefix('>=').strip()})" if "layers" in formula else ""
    text = (
        f"{rewrite} fired {report.matches[rewrite]} times in {report.num_layers or 'no'} layers, "
        f"expected {expected_text}"
    )
    too_often = report.matches[rewrite] > number
    return text if too_often else f"{text}; {_why_missing(report, rewrite)}"


def _why_missing(report: Report, rewrite: str) -> str:
    """The layers without a rewrite, and its near miss or other reason."""
    causes = [rewrite, *report.built_on(rewrite)]
    near = [miss for name in causes for miss in report.near if miss.rewrite == name]
    if near:
        layers = spans(miss.layer for miss in near if miss.layer is not None)
        where = f"not in layers {layers}. " if layers else ""
        return f"{where}Near miss: {near[0].text()}"
    per_layer = Counter(site.layer for site in report.sites if site.rewrite == rewrite)
    without = [layer for layer in report.layers if not per_layer[layer]]
    where = f"none in layers {spans(without)}. " if without else ""
    return where + report.why(rewrite)


def check(report: Report, options: Options) -> None:
    """Raise ContractError, or warn (expect_mode="warn"), if a graph violates option `expect`."""
    broken = violations(report, options.expect)
    if not broken:
        return
    text = f"{report.model} breaks its contract: " + " | ".join(broken)
    report.notes.append(text)
    if options.expect_mode == "error":
        raise ContractError(text)
    log.warning(text)


def differences(saved: Sequence[Report], reports: Sequence[Report]) -> list[str]:
    """The changes of counts and kernels since reports were saved, one line each; for a rewrite that
    fires less often, with the reason.
    """
    changes = []
    if len(saved) != len(reports):
        breaks = [
            f"{r.graph_break.source}: {r.graph_break.summary}"
            for r in reports
            if r.graph_break is not None
        ]
        where = f" (breaks at {'; '.join(breaks)})" if breaks else ""
        changes.append(f"{len(reports)} graphs instead of {len(saved)}{where}")
    many = len(reports) > 1
    for number, (before, current) in enumerate(zip(saved, reports, strict=False)):
        where = f"graph {number}: " if many else ""
        changes += [where + line for line in _changes(before, current)]
    return changes


def _changes(before: Report, current: Report) -> list[str]:
    lost = before.treated and not current.treated
    facts = (
        ("model", before.model, current.model, ""),
        ("treated", before.treated, current.treated, f" ({current.why_not})" if lost else ""),
        ("layers", before.num_layers, current.num_layers, ""),
    )
    changes = [f"{name}: {a!r} became {b!r}{why}" for name, a, b, why in facts if a != b]
    if lost:
        return changes
    for rewrite in sorted(before.matches.keys() | current.matches.keys()):
        was, count = before.matches[rewrite], current.matches[rewrite]
        if was > count:
            changes.append(_violation_text(current, rewrite, was, False, str(was)))
        elif was < count:
            changes.append(f"{rewrite} fired {count} times instead of {was}")
    old, new = _kernels(before), _kernels(current)
    for op in sorted(old.keys() | new.keys()):
        if old.get(op) != new.get(op):
            names = [counted(of.get(op, {})) or "nothing" for of in (old, new)]
            changes.append(f"{op}: {names[0]} became {names[1]}")
    return changes


def _kernels(report: Report) -> dict[str, Counter[str]]:
    """Of "op for T tokens" -> kernel -> number of calls."""
    kernels: dict[str, Counter[str]] = {}
    for choice in report.kernels:
        kernels.setdefault(f"{choice.op} for {choice.tokens} tokens", Counter())[choice.chosen] += 1
    return kernels
