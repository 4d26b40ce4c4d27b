"""Why not here? For each rewrite the places where its pattern nearly matched, ranked by how much of
it is there.

growth.py finds the differences at one place. Nothing is decided here: search.py does that. A place
where no difference is found although the search refused it is a bug of ours.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.fx import Node

from atomc.graph.canonical import GENERIC, call, spell
from atomc.rewriting.matching.conditions import problems
from atomc.rewriting.matching.growth import Growth
from atomc.rewriting.matching.pattern import Difference, Index, Pattern

# A pattern is worth showing if all of it is there but for one edit, which takes two nodes at least,
# or if it is larger and most of it is there.
SMALLEST_WHOLE = 2
MOST_EDITS = 2
LEAST_SHARE = 0.6
LEAST_UNEDITED = 3
# A miss that shares more than this part of its nodes with a better one of the same rewrite is the
# same place.
SAME_PLACE = 0.5


@dataclass
class NearMiss:
    """How far a rewrite's pattern got from one anchor, and every difference found on the way, first
    cause first.
    """

    rewrite: str
    variant: str
    anchor: Node
    matched: int
    total: int
    edits: int  # structural differences stepped over
    differences: list[Difference]
    nodes: set[Node] = field(default_factory=set)
    absent: tuple[str, ...] = ()  # telling ops of the pattern that are not here at all
    missing: int = 0  # nodes of the pattern whose place is empty; they count as matched
    because: "NearMiss | None" = None  # the recognition miss that caused this one

    @property
    def score(self) -> tuple[float, int, int]:
        return (self.matched - self.edits) / self.total, -self.missing, -len(self.differences)

    @property
    def near(self) -> bool:
        """Worth showing: all is there but for one edit, or most of a larger pattern is."""
        if not self.differences or self.absent:
            return False
        if self.edits <= 1 and (
            self.matched == self.total >= SMALLEST_WHOLE or self.differences[0].kind == "taken"
        ):
            return True
        most = (
            self.matched >= LEAST_SHARE * self.total and self.matched - self.edits >= LEAST_UNEDITED
        )
        return most and self.edits <= MOST_EDITS

    @property
    def complete(self) -> bool:
        """Nothing differs: where the search refused such a site, one of the two is wrong."""
        return not self.differences and self.matched == self.total and not self.missing

    @property
    def first(self) -> Difference:
        """The first cause: of the recognition miss behind this one, if there is one."""
        return self.because.first if self.because else self.differences[0]


def near_misses(
    patterns: Iterable[tuple[str, str, Pattern]], index: Index, causes: Sequence[NearMiss] = ()
) -> tuple[list[NearMiss], list[NearMiss]]:
    """The best explanation per site for every (rewrite, variant, pattern), in graph order; and
    those without a reason.

    causes: near misses of earlier rewrites; a miss that lacks what one of these would have made
    points to it.
    """
    found = [
        explain(pattern, p, g, rewrite, variant)
        for rewrite, variant, pattern in patterns
        for p in anchors(pattern)
        for g in index[call(p).op]
    ]
    shown: list[NearMiss] = []
    taken: dict[str, list[set[Node]]] = defaultdict(list)
    for miss in sorted(found, key=lambda miss: miss.score, reverse=True):
        if any(
            len(miss.nodes & nodes) > SAME_PLACE * len(miss.nodes) for nodes in taken[miss.rewrite]
        ):
            continue
        if miss.near or (miss.differences and not miss.absent and _caused(miss, causes)):
            miss.because = _caused(miss, causes)
            shown.append(miss)
            taken[miss.rewrite].append(miss.nodes)
    return sorted(shown, key=lambda miss: miss.anchor), [miss for miss in found if miss.complete]


def _caused(miss: NearMiss, causes: Sequence[NearMiss]) -> NearMiss | None:
    first = miss.differences[0]
    return next(
        (
            cause
            for cause in causes
            if first.node in cause.nodes and any(cause.rewrite in op for op in first.ops)
        ),
        None,
    )


def anchors(pattern: Pattern) -> list[Node]:
    """The pattern's telling nodes. Decided by the pattern alone, so that the answer does not change
    with depth.
    """
    ops = {call(p).op for p in pattern.nodes}
    keep = (ops - GENERIC) or (ops & {"cat", "sub", "neg", "mean"}) or ops
    return [p for p in pattern.nodes if call(p).op in keep]


def explain(pattern: Pattern, p: Node, g: Node, rewrite: str = "", variant: str = "") -> NearMiss:
    """Grow a match of `pattern` from the pair (p, g) and report how it differs."""
    growth = Growth(pattern, p, g)
    growth.run()
    site = growth.site
    structural = growth.structural()
    placed = [node for node in pattern.nodes if site.at(node) is not None]
    differences = structural + problems(
        site, partial=bool(structural) or len(placed) < len(pattern.nodes)
    )
    telling = {call(node).op for node in pattern.nodes} - GENERIC
    absent = tuple(sorted(telling - {call(node).op for node in placed}))
    return NearMiss(
        rewrite,
        variant,
        g,
        len(placed),
        len(pattern.nodes),
        _num_edits(structural),
        differences,
        site.nodes(),
        absent,
        len(growth.missing),
    )


def _num_edits(structural: Sequence[Difference]) -> int:
    """How many things are different: one dim given to several ops is one, so is one op put in
    between at several places.
    """

    def what(d: Difference) -> Any:
        return {"attribute": d.found, "extra op": spell(d.node)}.get(d.kind, id(d))

    return len({(d.kind, what(d)) for d in structural})
