"""Writes docs/rooms.md and docs/rooms.svg: the rooms of the product, what each holds, and what each
may import.

    python docs/tools/rooms.py            writes both
    python docs/tools/rooms.py --check    exits with 1 if one of them is not current
"""

import ast
import re
import sys
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "atomc"
# Each storey begins with the layer that holds this room. From the ground.
STOREYS = {
    "files": ("Foundations", "files, errors, options, the device"),
    "ops": ("Ops", "what an operation means, and where weights live"),
    "capture": ("Graphs and kernels", "what the compiler works on"),
    "dumps": ("Compiler", "rewrites, passes, and the driver of both"),
    "models": ("Models", "language models and their checkpoints"),
    "runtime.config_fields": ("Runtime", "from requests to tokens"),
    "runtime.server.engines": ("Server", "the same over HTTP"),
    "planning": ("Commands", "what a shell starts"),
}
WIDTH, MARGIN, ROW, GAP, LETTER = 470, 12, 28, 6, 7.1
STYLE = """
  .storey { fill: #f3f5f9; stroke: #c5cede }
  .folder { fill: #3556a8; stroke: #3556a8 }
  .file { fill: #ffffff; stroke: #8a98b5 }
  text { font: 13px system-ui, sans-serif; fill: #1b2233 }
  .in { fill: #ffffff }
  .title { font-weight: 600; font-size: 15px }
  .note { fill: #4d5870 }
  @media (prefers-color-scheme: dark) {
    .storey { fill: #1c2230; stroke: #3a4560 }
    .folder { fill: #8fb0ff; stroke: #8fb0ff }
    .file { fill: #262e40; stroke: #66738f }
    text { fill: #e6eaf4 }
    .in { fill: #10182b }
    .note { fill: #a9b4cc }
  }"""


def layers() -> list[list[str]]:
    """The table LAYERS of tests/repo/test_imports.py, from the lowest, each layer in order."""
    tree = ast.parse((ROOT / "tests/repo/test_imports.py").read_text())
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "LAYERS":
            return [sorted(layer) for layer in ast.literal_eval(node.value)]
    raise ValueError("tests/repo/test_imports.py assigns no LAYERS")


def sentence(path: Path) -> str:
    """The first sentence of the docstring of a file, as a cell of a table."""
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    paragraph = " ".join(docstring.partition("\n\n")[0].split())
    return re.split(r"(?<=\.) (?=[A-Z])", paragraph, maxsplit=1)[0].replace("|", "\\|")


def source(room: str) -> Path:
    """The file whose docstring says what a room of LAYERS holds."""
    path = PACKAGE.joinpath(*room.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def folders(below: Path) -> Iterator[Path]:
    """All folders of modules, also those that are links."""
    for path in sorted(below.iterdir()):
        if (path / "__init__.py").exists():
            yield path
            yield from folders(path)


def storeys() -> list[tuple[str, list[list[str]]]]:
    """Name and layers of each storey, from the ground."""
    result: list[tuple[str, list[list[str]]]] = []
    for layer in layers():
        first = next((room for room in layer if room in STOREYS), None)
        if first is not None:
            result.append((first, []))
        result[-1][1].append(layer)
    if missing := STOREYS.keys() - {first for first, _ in result}:
        raise ValueError(f"rooms {sorted(missing)} of STOREYS are not in LAYERS")
    return result


def rows(layer: Sequence[str], width: float) -> list[list[tuple[str, float]]]:
    """The rooms of a layer with the width of their boxes, in as many rows as needed."""
    result: list[list[tuple[str, float]]] = [[]]
    left = width
    for room in layer:
        box = 17 + LETTER * len(label(room))
        if box > left and result[-1]:
            result.append([])
            left = width
        result[-1].append((room, box))
        left -= box + GAP
    return result


def label(room: str) -> str:
    return room.removeprefix("runtime.server.").removeprefix("runtime.")


def picture() -> str:
    """The storeys as SVG, the ground at the bottom; a row may import itself and what is below."""
    inner = WIDTH - 4 * MARGIN
    lines: list[str] = []
    top = MARGIN
    for first, content in reversed(storeys()):
        title, note = STOREYS[first]
        boxes = [row for layer in reversed(content) for row in rows(layer, inner)]
        height = 38 + len(boxes) * (ROW + GAP) + GAP
        lines.append(
            f'<rect class="storey" x="{MARGIN}" y="{top}" width="{WIDTH - 2 * MARGIN}" '
            f'height="{height}" rx="8"/>'
        )
        lines.append(
            f'<text x="{2 * MARGIN}" y="{top + 25}"><tspan class="title">{escape(title)}</tspan>'
            f'<tspan class="note" dx="10">{escape(note)}</tspan></text>'
        )
        y = top + 38
        for row in boxes:
            x = 2.0 * MARGIN
            for room, box in row:
                kind = "folder" if PACKAGE.joinpath(*room.split(".")).is_dir() else "file"
                lines.append(
                    f'<rect class="{kind}" x="{x:g}" y="{y}" width="{box:g}" height="{ROW}" '
                    'rx="5"/>'
                )
                lines.append(
                    f'<text class="{"in" if kind == "folder" else "out"}" x="{x + box / 2:g}" '
                    f'y="{y + 19}" text-anchor="middle">{escape(label(room))}</text>'
                )
                x += box + GAP
            y += ROW + GAP
        top += height + GAP
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top + GAP}" '
        f'width="{WIDTH}" role="img" aria-label="The rooms of atomc, from the commands at the '
        'top to the foundations">\n'
        f"<style>{STYLE}\n</style>\n" + "\n".join(lines) + "\n</svg>\n"
    )


def page() -> str:
    """The picture, and the sentence of each room and of each folder in it."""
    parts = [
        "# Rooms\n",
        "Where things are, and what may import what. A row of the picture imports itself and the "
        "rows below it, never one above;\n`tests/repo/test_imports.py` has the table and checks "
        "every import, `tests/repo/test_rooms.py` that no two rooms import each other in a "
        "circle.\nA filled box is a folder, a white one a file. `make rooms` writes this page from "
        "that table and from the first sentence of each\ndocstring: to change a sentence, change "
        "the docstring.\n",
        "![The rooms of atomc, from the commands at the top to the foundations](rooms.svg)\n",
    ]
    for first, content in reversed(storeys()):
        title, note = STOREYS[first]
        parts.append(
            f"## {title}\n\n{note[0].upper()}{note[1:]}.\n\n| room | what it holds |\n|---|---|"
        )
        for room in (room for layer in reversed(content) for room in layer):
            path = source(room)
            parts.append(f"| `{name(path)}` | {sentence(path)} |")
            if path.name == "__init__.py":
                parts += [
                    f"| `{name(folder / '__init__.py')}` | {sentence(folder / '__init__.py')} |"
                    for folder in folders(path.parent)
                    if ".".join(folder.relative_to(PACKAGE).parts) not in ROOMS
                ]
        parts[-1] += "\n"
    return "\n".join(parts)


def name(path: Path) -> str:
    """As it is written in the repository, where three folders are linked into the package."""
    path = path.parent if path.name == "__init__.py" else path
    ending = "/" if path.is_dir() else ""
    return str(path.resolve().relative_to(ROOT)) + ending


ROOMS = {room for layer in layers() for room in layer}


def main(check: bool) -> int:
    texts = {"docs/rooms.md": page(), "docs/rooms.svg": picture()}
    stale = [
        path
        for path, text in texts.items()
        if not (ROOT / path).exists() or (ROOT / path).read_text() != text
    ]
    if check and stale:
        print(f"{', '.join(stale)}: not current, run `make rooms`")
        return 1
    for path in stale:
        (ROOT / path).write_text(texts[path])
    return 0


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
