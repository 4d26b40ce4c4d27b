"""A complete search for a traced pattern in a functional ATen graph.

It tries both orders of commutative operands and every candidate for further outputs, with
backtracking. conditions.py checks sizes, dtypes and readers; near_miss.py explains places where the
search nearly succeeded.
"""

from collections.abc import Callable, Iterator
from functools import partial

from torch.fx import Node

from atomc.graph.canonical import VIEWS, call, keeps_last_dim, readers, value
from atomc.rewriting.matching.attributes import attr_differences
from atomc.rewriting.matching.conditions import problems
from atomc.rewriting.matching.pattern import Deferred, Difference, Index, MatchSite, Pattern

# A change of the site that returns whether it is valid, and the pairs to match after it.
Way = tuple[Callable[[], bool], list[tuple[Node, Node]]]


def unify(site: MatchSite, pairs: list[tuple[Node, Node]]) -> Iterator[MatchSite]:
    """Every way to match the pattern node of each pair with its graph node. The site is changed and
    restored.
    """
    if not pairs:
        yield site
        return
    (p, g), rest = pairs[0], pairs[1:]
    for change, more in _ways(site, p, g):
        saved = site.copy()
        if change():
            yield from unify(site, more + rest)
        site.restore(saved)


def _ways(site: MatchSite, p: Node, g: Node) -> Iterator[Way]:
    """The ways to match p with g."""
    placed = site.at(p)
    if p in site.pattern.inputs:
        yield partial(_bind, site, site.pattern.inputs[p], g), []
    elif placed is g:
        yield (lambda: True), []
    else:
        if placed is None:
            yield from _placements(site, p, g)
        if (
            site.pattern.sees_through
            and _may_be_skipped(g)
            and (placed is not None or call(p).op not in VIEWS)
        ):
            yield partial(_skip, site, g), [(p, call(g).operands[0])]


def _placements(site: MatchSite, p: Node, g: Node) -> Iterator[Way]:
    """p at g, with the operands in each equivalent order; a cast may also be absent if the dtype is
    right.
    """
    wanted, here = call(p), call(g)
    if (
        wanted.op == here.op
        and len(wanted.operands) == len(here.operands)
        and g not in site.matched.values()
    ):
        for order in here.orders():
            yield partial(_place, site, p, g), list(zip(wanted.operands, order, strict=True))
    if wanted.op == "cast" and here.op != "cast":
        yield partial(skip_cast, site, p, g), [(wanted.operands[0], g)]


def _bind(site: MatchSite, name: str, g: Node) -> bool:
    return site.bound.setdefault(name, g) is g


def _place(site: MatchSite, p: Node, g: Node) -> bool:
    site.matched[p] = g
    return next(attr_differences(site, p, g), None) is None


def _skip(site: MatchSite, view: Node) -> bool:
    site.skipped.append(view)
    return True


def _may_be_skipped(g: Node) -> bool:
    return call(g).op in VIEWS and keeps_last_dim(g)


def skip_cast(site: MatchSite, p: Node, g: Node) -> bool:
    """Match a cast of the pattern with a node that has the dtype already, which is checked once all
    inputs are bound.
    """
    site.alias[p] = g
    site.deferred.append(Deferred(p, g, "dtype", call(p).attrs["dtype"], value(g).dtype))
    return True


def _candidates(site: MatchSite, output: Node) -> list[Node]:
    """Candidates for a further output, among the readers of matched nodes."""
    taken = set(site.matched.values())
    nodes = _together(site, output) if site.pattern.read_together else _reached(site, output, taken)
    return [node for node in dict.fromkeys(nodes) if node not in taken]


def _together(site: MatchSite, output: Node) -> Iterator[Node]:
    """The nodes read together with the first placed output, in the order of the pattern."""
    outputs = site.pattern.outputs
    first = next(placed for placed in outputs if site.at(placed) is not None)
    here, later = site.outputs()[0], outputs.index(output) > outputs.index(first)
    for reader in here.users:
        for operand in read_beside(reader, here, later):
            yield from _cached_calls(operand, call(output).op)


def read_beside(reader: Node, read: Node, later: bool) -> list[Node]:
    """The operands of the reader after (or before) `read`."""
    operands = call(reader).operands
    if read not in operands:
        return []
    at = operands.index(read)
    return operands[at + 1 :] if later else operands[:at]


def _reached(site: MatchSite, p: Node, taken: set[Node]) -> list[Node]:
    """The candidates for p: readers of the candidates for its operands."""
    here = site.bound.get(site.pattern.inputs[p]) if p in site.pattern.inputs else site.at(p)
    if here is not None:
        return [here]
    return [
        user
        for operand in call(p).operands
        for node in _reached(site, operand, taken)
        for user in _readers(site, node)
        if call(user).op == call(p).op and user not in taken
    ]


def _readers(site: MatchSite, node: Node) -> Iterator[Node]:
    """The readers of a node, through views if the pattern sees through them."""
    for user in readers(node):
        yield user
        if site.pattern.sees_through and _may_be_skipped(user):
            yield from user.users


def _cached_calls(node: Node, op: str, depth: int = 4) -> Iterator[Node]:
    """The node itself if it calls `op`, else the calls of `op` written to the cache that it is
    a view of.
    """
    here = call(node)
    if here.op == op:
        yield node
    elif depth and here.op in ("permute", "view", "slice", "index_copy"):
        for operand in here.operands:
            yield from _cached_calls(operand, op, depth - 1)


def _complete(site: MatchSite) -> Iterator[MatchSite]:
    missing = next((output for output in site.pattern.outputs if site.at(output) is None), None)
    if missing is None:
        yield site
        return
    for candidate in _candidates(site, missing):
        for grown in unify(site, [(missing, candidate)]):
            yield from _complete(grown)


def matches(pattern: Pattern, index: Index) -> Iterator[tuple[MatchSite, list[Difference]]]:
    """Every place where the structure matches, with the reasons against the rewrite, if any."""
    root = min(pattern.outputs, key=lambda output: len(index[call(output).op]))
    starts = list(index[call(root).op])
    if call(root).op == "cast":  # absent if the model's dtype is right already
        starts += index[call(call(root).operands[0]).op]
    for start in starts:
        # The last cast may be absent at a node that is followed by a cast: take the first way
        # without differences.
        best: tuple[MatchSite, list[Difference]] | None = None
        for site in unify(MatchSite(pattern), [(root, start)]):
            done = next(_complete(site), None)
            if done is None:
                continue
            complete = done.copy()
            wrong = problems(complete)
            if best is None or not wrong:
                best = complete, wrong
            if not wrong:
                break
        if best is not None:
            yield best
