"""The graphs of the HTML report: what each pass changed, before all passes, after them."""

from typing import Any

from atomc.graph.graph_printer import NodeLine, parse
from atomc.report.render.first_sentence import first_sentence
from atomc.report.render.graph_diff import Hunk, hunks
from atomc.report.report_data import ReportData

# Per pass; a model with different layers has thousands.
MAX_HUNKS = 60


def pass_changes(report: ReportData) -> list[dict[str, Any]]:
    """The changes of each pass, side by side."""
    changes, last = [], ""
    for stage in report.stages:
        before = stage.before or last
        changed: list[Hunk] = (
            hunks(parse(before), parse(stage.text)) if before and stage.text else []
        )
        changes.append(
            {
                "name": stage.name,
                "changed": stage.changed,
                "hunks": changed[:MAX_HUNKS],
                "more": len(changed[MAX_HUNKS:]),
                "kept": bool(before and stage.text),
                "about": first_sentence(report.about.get(stage.name, "")),
            }
        )
        last = stage.text or last
    shown = (step for step in changes if step["hunks"] and step["about"] and step["name"] != "lift")
    first = next(shown, None)
    return [
        {**step, "first": step is first, "number": number}
        for number, step in enumerate(changes, start=1)
    ]


def captured_graph(report: ReportData) -> list[NodeLine]:
    """The functional graph before all passes (not Dynamo's graph, which only lifting changes)."""
    stages = [stage for stage in report.stages if stage.name != "lift"]
    return parse(next((stage.before for stage in stages if stage.before), ""))


def final_graph(report: ReportData) -> list[NodeLine]:
    return (
        parse(report.stages[-1].text) if report.stages and report.stages[-1].name != "lift" else []
    )
