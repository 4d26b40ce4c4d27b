"""Near misses: places where the pattern of a rewrite nearly matched, ranked by the matched part.

growth.py finds the differences at one place. search.py decides what matches: a place without
differences that the search refused is a bug.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field

from torch.fx import Node

from atomc.graph.canonical import GENERIC, call, spell
from atomc.rewriting.matching.conditions import problems
from atomc.rewriting.matching.growth import Growth
from atomc.rewriting.matching.pattern import Difference, Index, Pattern

# A near miss is shown if all of the pattern but one edit is matched, which takes at least two
# nodes, or most of a larger pattern.
SMALLEST_WHOLE = 2
MOST_EDITS = 2
LEAST_SHARE = 0.6
LEAST_UNEDITED = 3
# A miss that shares more than this fraction of its nodes with a better one of the same rewrite is
# at the same place.
SAME_PLACE = 0.5


@dataclass
class NearMiss:
    """A partial match that contains the anchor, with all differences, first cause first.

    edits    structural differences stepped over
    absent   characteristic ops of the pattern without any match
    missing  number of nodes of the pattern without a counterpart; they count as matched
    in_next_layer  as in Growth
    because  the near miss of a recognition that caused this one
    """

    rewrite: str
    variant: str
    anchor: Node
    matched: int
    total: int
    edits: int
    differences: list[Difference]
    nodes: set[Node] = field(default_factory=set)
    absent: tuple[str, ...] = ()
    missing: int = 0
    in_next_layer: bool = False
    because: "NearMiss | None" = None

    @property
    def score(self) -> tuple[float, int, int]:
        return (self.matched - self.edits) / self.total, -self.missing, -len(self.differences)

    @property
    def near(self) -> bool:
        """Whether to show it: all but one edit is matched, or most of a larger pattern."""
        if not self.differences or self.absent or self.in_next_layer:
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
        """Whether nothing differs. If the search refused such a site, that is a bug."""
        return not self.differences and self.matched == self.total and not self.missing

    @property
    def first(self) -> Difference:
        """The first cause, of the recognition if that caused this near miss."""
        return self.because.first if self.because else self.differences[0]


def near_misses(
    patterns: Iterable[tuple[str, str, Pattern]], index: Index, causes: Sequence[NearMiss] = ()
) -> tuple[list[NearMiss], list[NearMiss]]:
    """The best explanation per site for every (rewrite, variant, pattern), in graph order; and
    those without a difference.

    causes: near misses of earlier rewrites; a miss without the op that one of these would have
    created refers to it.
    """
    explained = [
        explain(pattern, p, g, rewrite, variant)
        for rewrite, variant, pattern in patterns
        for p in anchors(pattern)
        for g in index[call(p).op]
    ]
    shown: list[NearMiss] = []
    taken: dict[str, list[set[Node]]] = defaultdict(list)
    for miss in sorted(explained, key=lambda miss: miss.score, reverse=True):
        if any(
            len(miss.nodes & nodes) > SAME_PLACE * len(miss.nodes) for nodes in taken[miss.rewrite]
        ):
            continue
        if miss.near or (miss.differences and not miss.absent and _caused(miss, causes)):
            miss.because = _caused(miss, causes)
            shown.append(miss)
            taken[miss.rewrite].append(miss.nodes)
    return sorted(shown, key=lambda miss: miss.anchor), [
        miss for miss in explained if miss.complete
    ]


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
    """The characteristic nodes of the pattern, independent of the graph."""
    ops = anchor_ops({call(p).op for p in pattern.nodes})
    return [p for p in pattern.nodes if call(p).op in ops]


def anchor_ops(ops: Set[str]) -> Set[str]:
    """The characteristic ones among the ops of a pattern: a graph without any has no near miss."""
    return (ops - GENERIC) or (ops & {"cat", "sub", "neg", "mean"}) or ops


def explain(pattern: Pattern, p: Node, g: Node, rewrite: str = "", variant: str = "") -> NearMiss:
    """Grow a match of `pattern` from the pair (p, g) and collect the differences."""
    growth = Growth(pattern, p, g)
    growth.run()
    site = growth.site
    structural = growth.structural()
    placed = [node for node in pattern.nodes if site.at(node) is not None]
    differences = structural + problems(
        site, partial=bool(structural) or len(placed) < len(pattern.nodes)
    )
    absent = tuple(sorted(pattern.telling - {call(node).op for node in placed}))
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
        growth.in_next_layer,
    )


def _num_edits(structural: Sequence[Difference]) -> int:
    """The number of distinct differences: one attribute of several ops counts once, and so does one
    extra op at several places.
    """

    def what(d: Difference) -> str | int:
        if d.kind == "attribute":
            return d.found
        return spell(d.node) if d.kind == "extra op" else id(d)

    return len({(d.kind, what(d)) for d in structural})
