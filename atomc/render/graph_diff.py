"""Graphs as rows for people: what repeats from layer to layer once, and two graphs side by side."""

import bisect
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from atomc.graph.provenance import layer_of
from atomc.render.text import collapsed

CONTEXT = 1
_NUMBERED = re.compile(r"\b([A-Za-z_]\w*?)_\d+\b")


@dataclass(frozen=True)
class Line:
    """One node, as atomc.graph_printer writes it."""

    name: str
    call: str
    type: str = ""
    path: str = ""
    source: str = ""

    @cached_property
    def layer(self) -> int | None:
        if self.call == "input":  # a parameter's path; a number at the end counts dimensions or items
            return layer_of(self.name.rpartition(".")[0])
        return layer_of(self.path)

    @property
    def place(self) -> str:
        """The module below its layer; the whole path outside of layers."""
        return re.sub(r"^(?:.*?\.)??\d+(?:\.|$)", "", self.path) if self.layer is not None else self.path

    @cached_property
    def key(self) -> tuple[str, ...]:
        """What lines of equal layers have in common."""
        name = collapsed(self.name) if self.call == "input" else _NUMBERED.sub(r"\1", self.name)
        return name, collapsed_names(self.call), self.type, collapsed(self.path), self.source


def collapsed_names(text: str) -> str:
    """Names of nodes without their numbers, and module paths without that of the layer."""
    return re.sub(r"\.\d+(?=\.)", ".*", _NUMBERED.sub(r"\1", text))


def parsed(text: str) -> list[Line]:
    """The lines of a listing."""
    return [_line(line) for line in text.splitlines()]


def _line(text: str) -> Line:
    if text.startswith("return "):
        return Line("return", text.removeprefix("return "))
    left, _, note = text.partition("  # ")
    name, _, call = left.partition(" = ")
    kind, _, rest = note.partition("  ")
    path, _, source = rest.rpartition("  ")
    return Line(name, call, *("" if part == "-" else part for part in (kind, path, source)))


# ---- one graph


@dataclass
class Block:
    """Lines in a row that belong to one layer, and all the layers that look the same."""

    lines: list[Line]
    layers: list[int] = field(default_factory=list)


def folded(lines: Sequence[Line]) -> list[Block]:
    """The lines of each kind of layer once."""
    found: list[Block] = []
    known: dict[tuple[tuple[str, ...], ...], Block] = {}
    for layer, run in _runs(lines):
        key = tuple(line.key for line in run)
        if layer is not None and key in known:
            known[key].layers.append(layer)
            continue
        found.append(Block(run, [] if layer is None else [layer]))
        if layer is not None:
            known[key] = found[-1]
    return found


def _runs(lines: Sequence[Line]) -> Iterator[tuple[int | None, list[Line]]]:
    """Lines in a row of one layer; what is of no layer inside of one, or between it and the next, belongs to it."""
    layers = [line.layer for line in lines]
    following: int | None = None
    after: list[int | None] = [None] * len(lines)
    for i in reversed(range(len(lines))):
        after[i] = following
        following = layers[i] if layers[i] is not None else following
    current: int | None = None
    start = 0
    for i, layer in enumerate(layers):
        follows = after[i]
        inside = layer is None and current is not None and follows is not None and follows >= current
        belongs = current if inside else layer
        if belongs != current and i > start:
            yield current, list(lines[start:i])
            start = i
        current = belongs
    if len(lines) > start:
        yield current, list(lines[start:])


# ---- two graphs


@dataclass(frozen=True)
class Row:
    """A node before and after. kind: "same", "changed", "gone", "made", "replaced" (by what stands beside it)."""

    kind: str
    left: Line | None
    right: Line | None

    @property
    def layer(self) -> int | None:
        layers = [line.layer for line in (self.right, self.left) if line is not None]
        return next((layer for layer in layers if layer is not None), None)


@dataclass
class Hunk:
    """Rows that changed, with what stands around them, and how often and in which layers the same happened."""

    rows: list[Row]
    count: int = 0
    layers: set[int] = field(default_factory=set)


def hunks(before: Sequence[Line], after: Sequence[Line]) -> list[Hunk]:
    """What differs between two graphs whose nodes kept their names; what is the same in several layers once."""
    rows = list(aligned(before, after))
    groups: dict[tuple[object, ...], Hunk] = {}
    for start, end in _changes(rows):
        changed = rows[start:end]
        key = tuple((row.kind, row.left and row.left.key, row.right and row.right.key) for row in changed)
        around = rows[max(start - CONTEXT, 0):start], rows[end:end + CONTEXT]
        hunk = groups.setdefault(key, Hunk([*_same(around[0]), *changed, *_same(around[1])]))
        hunk.count += 1
        hunk.layers |= {row.layer for row in changed if row.layer is not None}
    return list(groups.values())


def _same(rows: Iterable[Row]) -> list[Row]:
    return [row for row in rows if row.kind == "same"]


def _changes(rows: Sequence[Row]) -> Iterator[tuple[int, int]]:
    """Stretches of rows that changed, within one layer."""
    start: int | None = None
    layer: int | None = None
    for i, row in enumerate(rows):
        changed = row.kind != "same"
        if start is not None and (not changed or (None not in (layer, row.layer) and row.layer != layer)):
            yield start, i
            start = None
        if changed:
            start, layer = (i, row.layer) if start is None else (start, layer if layer is not None else row.layer)
    if start is not None:
        yield start, len(rows)


def aligned(before: Sequence[Line], after: Sequence[Line]) -> Iterator[Row]:
    """Rows of both graphs: nodes of one name beside each other, where that keeps both orders."""
    place = {line.name: i for i, line in enumerate(after)}
    kept = _longest_rising([(i, place[line.name]) for i, line in enumerate(before) if line.name in place])
    a = b = 0
    for i, j in [*kept, (len(before), len(after))]:
        yield from _gap(before[a:i], after[b:j])
        if i < len(before):
            left, right = before[i], after[j]
            same = (left.call, left.type) == (right.call, right.type)
            yield Row("same" if same else "changed", left, right)
        a, b = i + 1, j + 1


def _gap(gone: Sequence[Line], made: Sequence[Line]) -> Iterator[Row]:
    both = min(len(gone), len(made))
    yield from (Row("replaced", left, right) for left, right in zip(gone[:both], made[:both], strict=True))
    yield from (Row("gone", line, None) for line in gone[both:])
    yield from (Row("made", None, line) for line in made[both:])


def _longest_rising(pairs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The most pairs whose second numbers rise, by patience sorting."""
    tops: list[int] = []
    piles: list[int] = []
    previous: list[int] = []
    for number, (_, j) in enumerate(pairs):
        at = bisect.bisect_left(tops, j)
        previous.append(piles[at - 1] if at else -1)
        if at == len(tops):
            tops.append(j)
            piles.append(number)
        else:
            tops[at], piles[at] = j, number
    found, number = [], piles[-1] if piles else -1
    while number >= 0:
        found.append(pairs[number])
        number = previous[number]
    return found[::-1]
