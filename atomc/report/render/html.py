"""Reports as one HTML file: what the compiler did, by pass, layer and op.

The file needs no network and can be opened from disk. Its content security policy allows only its
own script and style; names from a model are escaped.
"""

import base64
import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path

from atomc.files.json_types import JSONLike
from atomc.report.records import spans
from atomc.report.render.compare import Comparison
from atomc.report.render.first_sentence import first_sentence
from atomc.report.render.graph_tab import Graph
from atomc.report.render.machines import known_machines
from atomc.report.render.table import format_bytes
from atomc.report.report_data import ReportData

HERE = Path(__file__).parent


def page(
    reports: Sequence[ReportData],
    others: Sequence[ReportData] = (),
    names: tuple[str, str] = ("first", "second"),
) -> str:
    """The HTML of reports, one tab per graph; with `others`, also of those and of the differences.

    Raises ImportError without jinja2.
    """
    try:
        from jinja2 import Environment, FileSystemLoader, StrictUndefined
    except ImportError as error:
        raise ImportError(
            "a report as HTML needs the library `jinja2`: pip install 'atomc[report]'"
        ) from error
    environment = Environment(
        loader=FileSystemLoader(HERE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    style, script = (f"\n{(HERE / name).read_text()}" for name in ("report.css", "report.js"))
    graphs = [Graph(i, report, names[0] if others else "") for i, report in enumerate(reports)]
    graphs += [Graph(len(reports) + i, report, names[1]) for i, report in enumerate(others)]
    compared = [Comparison(a, b, names) for a, b in zip(reports, others, strict=False)]
    data = {"graphs": [graph.data() for graph in graphs], "machines": known_machines()}
    environment.filters["bytes"] = format_bytes
    environment.filters["first_sentence"] = first_sentence
    title = f"{names[0]} compared with {names[1]}" if compared else "What the compiler did"
    if graphs and not compared:
        title += f" to {reports[0].model}"
    many = len(graphs) > 1
    text = environment.get_template("report.html").render(
        graphs=graphs,
        many=many,
        compared=compared,
        names=names,
        title=title,
        machines=data["machines"],
        spans=spans,
        style=style,
        script=script,
        data=_embedded(data),
        policy=policy(style, script),
    )
    return re.sub(r">\n\s*<", "><", text).lstrip()


def policy(style: str, script: str) -> str:
    """The content security policy: only this style and this script."""
    return (
        f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; "
        "base-uri 'none'; form-action 'none'"
    )


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _embedded(data: JSONLike) -> str:
    """JSON that is safe inside a script element."""
    text = json.dumps(data, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
