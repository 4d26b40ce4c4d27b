"""An audit as text: what the whole graph returns, who is to blame, and the places with the largest errors."""

from collections.abc import Mapping, Sequence
from typing import Any

from atomc.render.table import table

MAX_ROWS = 20
ORDERS = ("sqnr", "max", "relative")


def audit_text(audit: Mapping[str, Any], *, by: str = "sqnr", rows: int = MAX_ROWS) -> str:
    """The places ranked by signal to noise, or by the largest difference, absolute or relative; at most so many."""
    ranked = ranked_by(audit["sites"], by)
    parts = [headline(audit)]
    if ranked:
        head = ("rewrite", "runs as", "max", "relative", "SQNR", "original", "against", "in")
        parts.append(table(head, map(_row, ranked[:rows]), numbers=[2, 3, 4, 5]))
    if len(ranked) > rows:
        parts.append(f"and {len(ranked) - rows} places with smaller errors")
    return "\n\n".join([*parts, *audit["notes"]])


def headline(audit: Mapping[str, Any]) -> str:
    """One sentence, or two: the largest error of a place, and what the whole graph returns."""
    sites = audit["sites"]
    if not sites:
        return "nothing was rewritten"
    first = sites[0]
    text = f"{len(sites)} places; "
    if first["sqnr"] is None:
        text += "all equal the original"
    else:
        text += f"the worst is {_name(first)}, {_decibels(first)}"
    outputs = audit.get("outputs")
    if outputs is None:
        return text
    text += (f". What is returned is {outputs['compiled']:.2g} of the largest value away from fp32, the original "
             f"{outputs['original']:.2g}, the bound is {outputs['bound']:.2g}")  # fmt: skip
    return text + (f". {cause_text(audit['blame'])}" if "blame" in audit else "")


def cause_text(blame: Mapping[str, Any]) -> str:
    """Who causes the difference, and how that was found."""
    runs = f" ({blame['runs']} runs)" if blame["runs"] else ""
    if blame["rewrite"] == "glue":
        return "The kernels are within it: the cause is what Inductor made of the ops between them"
    if not blame["rewrite"]:
        return f"No rewrite is the cause{runs}: without any of them it is as far away"
    places = blame["places"]
    where = f" in {blame['module_path'] or 'the graph'}" if blame["module_path"] is not None else f", at {places} places"
    return f"The cause is {blame['rewrite']}{where}{runs}"


def ranked_by(sites: Sequence[Mapping[str, Any]], by: str) -> list[Mapping[str, Any]]:
    """The worst first."""
    if by == "sqnr":
        return list(sites)
    return sorted(sites, key=lambda site: -site["max_abs" if by == "max" else by])


def _name(site: Mapping[str, Any]) -> str:
    return f"{site['rewrite']} in {site['module_path'] or 'the graph'}"


def _row(site: Mapping[str, Any]) -> tuple[str, ...]:
    op = "" if site["op"] == site["rewrite"] else f" ({site['op']})"
    source = f" ({site['source']})" if site["source"] else ""
    return (site["rewrite"] + op, site["kernel"], f"{site['max_abs']:.2g}", f"{site['relative']:.1e}", _decibels(site),
            _decibels(site["original"]), site["against"], (site["module_path"] or "the graph") + source)  # fmt: skip


def _decibels(error: Mapping[str, Any]) -> str:
    return "exact" if error["sqnr"] is None else f"{error['sqnr']:.1f} dB"
