"""An audit as text: errors of the graph's outputs, their cause, and the sites with the largest."""

from collections.abc import Sequence

from atomc.report.audit_findings import AuditFindings, Blame, ErrorRow, SiteRow
from atomc.report.records import located
from atomc.report.render.table import table

MAX_ROWS = 20


def audit_text(audit: AuditFindings, *, by: str = "sqnr", rows: int = MAX_ROWS) -> str:
    """The first `rows` sites by SQNR, or by the largest difference (`by`: "max" or relative)."""
    ranked = ranked_by(audit["sites"], by)
    parts = [headline(audit)]
    if ranked:
        head = ("rewrite", "runs as", "max", "relative", "SQNR", "original", "against", "in")
        parts.append(table(head, map(_row, ranked[:rows]), numbers=[2, 3, 4, 5]))
    if len(ranked) > rows:
        parts.append(f"and {len(ranked) - rows} sites with smaller errors")
    return "\n\n".join([*parts, *audit["notes"]])


def headline(audit: AuditFindings) -> str:
    """A site's largest error and the errors of the outputs, in one or two sentences."""
    sites = audit["sites"]
    if not sites:
        return "nothing was rewritten"
    first = sites[0]
    text = f"{len(sites)} sites; "
    if first["sqnr"] is None:
        text += "all equal the original"
    else:
        where = located(first["module_path"])
        text += f"the worst is {first['rewrite']} in {where}, {_decibels(first)}"
    outputs = audit.get("outputs")
    if outputs is None:
        return text
    text += (
        f". Relative error of the outputs against fp32: {outputs['compiled']:.2g}, of the original "
        f"program {outputs['original']:.2g}, bound {outputs['bound']:.2g}"
    )
    return text + (f". {cause_text(audit['blame'])}" if "blame" in audit else "")


def cause_text(blame: Blame) -> str:
    """The cause of the difference."""
    runs = f" ({blame['runs']} runs)" if blame["runs"] else ""
    if blame["rewrite"] == "glue":
        return (
            "The kernels are within the bound: the cause is the code of Inductor for the "
            "ops between them"
        )
    if not blame["rewrite"]:
        return f"No rewrite is the cause{runs}: the error remains without all of them"
    places = blame["places"]
    path = blame["module_path"]
    where = f", at {places} sites" if path is None else f" in {located(path)}"
    return f"The cause is {blame['rewrite']}{where}{runs}"


def ranked_by(sites: Sequence[SiteRow], by: str) -> list[SiteRow]:
    """The sites, worst first."""
    if by == "sqnr":
        return list(sites)
    return sorted(sites, key=lambda site: -(site["max_abs"] if by == "max" else site["relative"]))


def _row(site: SiteRow) -> tuple[str, ...]:
    op = "" if site["op"] == site["rewrite"] else f" ({site['op']})"
    return (
        site["rewrite"] + op,
        site["kernel"],
        f"{site['max_abs']:.2g}",
        f"{site['relative']:.1e}",
        _decibels(site),
        _decibels(site["original"]),
        site["against"],
        located(site["module_path"], site["source"]),
    )


def _decibels(error: ErrorRow) -> str:
    return "exact" if error["sqnr"] is None else f"{error['sqnr']:.1f} dB"
