"""Printed graphs for a page: repeated layers are shown once, and two graphs side by side."""

import bisect
import functools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from atomc.graph.graph_printer import NodeLine
from atomc.report.render.table import collapsed

CONTEXT = 1
_NODE_NUMBER = re.compile(r"\b([A-Za-z_]\w*?)_\d+\b")


@functools.cache
def key(line: NodeLine) -> tuple[str, ...]:
    """Equal for the same line of equal layers."""
    name = collapsed(line.name) if line.call == "input" else _NODE_NUMBER.sub(r"\1", line.name)
    return name, collapsed_names(line.call), line.type, collapsed(line.path), line.source


def collapsed_names(text: str) -> str:
    """Text without the numbers of node names, and without the numbers of layers in module paths."""
    return re.sub(r"\.\d+(?=\.)", ".*", _NODE_NUMBER.sub(r"\1", text))


# ---- one graph


@dataclass
class Block:
    """Consecutive lines of one layer, and the numbers of all layers with equal lines."""

    lines: list[NodeLine]
    layers: list[int] = field(default_factory=list)


def fold_layers(lines: Sequence[NodeLine]) -> list[Block]:
    """The blocks of a graph, equal layers once."""
    blocks: list[Block] = []
    block_of: dict[tuple[tuple[str, ...], ...], Block] = {}
    for layer, run in _runs(lines):
        common = tuple(key(line) for line in run)
        if layer is not None and common in block_of:
            block_of[common].layers.append(layer)
            continue
        blocks.append(Block(run, [] if layer is None else [layer]))
        if layer is not None:
            block_of[common] = blocks[-1]
    return blocks


def _runs(lines: Sequence[NodeLine]) -> Iterator[tuple[int | None, list[NodeLine]]]:
    """(layer, consecutive lines). Lines without a layer that are in or between layers belong to the
    layer before them.
    """
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
        inside = (
            layer is None and current is not None and follows is not None and follows >= current
        )
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
    """A node before and after. kind: "same", "changed", "gone", "made" or "replaced"."""

    kind: str
    left: NodeLine | None
    right: NodeLine | None

    @property
    def layer(self) -> int | None:
        layers = [line.layer for line in (self.right, self.left) if line is not None]
        return next((layer for layer in layers if layer is not None), None)


@dataclass
class Hunk:
    """Consecutive changed rows with context, and the number and layers of equal changes."""

    rows: list[Row]
    count: int = 0
    layers: set[int] = field(default_factory=set)


def hunks(before: Sequence[NodeLine], after: Sequence[NodeLine]) -> list[Hunk]:
    """The differences of two graphs with equal names; a change in several layers is one."""
    rows = list(align(before, after))
    groups: dict[tuple[object, ...], Hunk] = {}
    for start, end in _changed_stretches(rows):
        changed = rows[start:end]
        change = tuple(
            (row.kind, row.left and key(row.left), row.right and key(row.right)) for row in changed
        )
        around = rows[max(start - CONTEXT, 0) : start], rows[end : end + CONTEXT]
        hunk = groups.setdefault(change, Hunk([*_same(around[0]), *changed, *_same(around[1])]))
        hunk.count += 1
        hunk.layers |= {row.layer for row in changed if row.layer is not None}
    return list(groups.values())


def _same(rows: Iterable[Row]) -> list[Row]:
    return [row for row in rows if row.kind == "same"]


def _changed_stretches(rows: Sequence[Row]) -> Iterator[tuple[int, int]]:
    """(start, end) of consecutive changed rows within one layer."""
    start: int | None = None
    layer: int | None = None
    for i, row in enumerate(rows):
        changed = row.kind != "same"
        if start is not None and (
            not changed or (None not in (layer, row.layer) and row.layer != layer)
        ):
            yield start, i
            start = None
        if changed:
            start, layer = (
                (i, row.layer)
                if start is None
                else (start, layer if layer is not None else row.layer)
            )
    if start is not None:
        yield start, len(rows)


def align(before: Sequence[NodeLine], after: Sequence[NodeLine]) -> Iterator[Row]:
    """Rows of both graphs, with nodes of the same name in one row where both orders allow it."""
    place = {line.name: i for i, line in enumerate(after)}
    pairs = _longest_increasing(
        [(i, place[line.name]) for i, line in enumerate(before) if line.name in place]
    )
    a = b = 0
    for i, j in [*pairs, (len(before), len(after))]:
        yield from _unmatched(before[a:i], after[b:j])
        if i < len(before):
            left, right = before[i], after[j]
            same = (left.call, left.type) == (right.call, right.type)
            yield Row("same" if same else "changed", left, right)
        a, b = i + 1, j + 1


def _unmatched(gone: Sequence[NodeLine], added: Sequence[NodeLine]) -> Iterator[Row]:
    both = min(len(gone), len(added))
    yield from (
        Row("replaced", left, right) for left, right in zip(gone[:both], added[:both], strict=True)
    )
    yield from (Row("gone", line, None) for line in gone[both:])
    yield from (Row("made", None, line) for line in added[both:])


def _longest_increasing(pairs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The longest subsequence with increasing second numbers, by patience sorting."""
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
    longest, number = [], piles[-1] if piles else -1
    while number >= 0:
        longest.append(pairs[number])
        number = previous[number]
    return longest[::-1]
