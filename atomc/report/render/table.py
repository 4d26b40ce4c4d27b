"""Plain text tables of 100 columns."""

import re
import textwrap
from collections.abc import Iterable, Sequence

WIDTH = 100

Row = Sequence[str]


def table(header: Row, rows: Iterable[Row], numbers: Sequence[int] = ()) -> str:
    """Aligned columns: those in `numbers` to the right; the last one is wrapped."""
    rows = list(rows)
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header) - 1)]
    lines = []
    for row in [header, *rows]:
        cells = [
            cell.rjust(width) if i in numbers else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=False))
        ]
        start = "  ".join([*cells, ""])
        lines.append(wrapped(row[-1], start, " " * len(start)))
    return "\n".join(lines)


def collapsed(path: str) -> str:
    """A module path with * instead of numbers: "model.layers.*.mlp"."""
    return re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", path)


def wrapped(text: str, start: str = "", indent: str = "  ") -> str:
    """Lines of at most WIDTH characters: the first begins with `start`, others with `indent`."""
    return (
        textwrap.fill(
            text,
            WIDTH,
            initial_indent=start,
            subsequent_indent=indent,
            break_on_hyphens=False,
            break_long_words=False,
        ).rstrip()
        or start.rstrip()
    )


def format_bytes(size: float) -> str:
    """A size in bytes as text: "12.5 MB"."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(size) < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"
