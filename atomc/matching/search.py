"""The matcher that decides: a small complete search for a traced pattern in a functional ATen graph.

It tries both orders of commutative operands and every reader for a further output, and undoes what fails. What structure
does not say is checked by conditions.py; near_miss.py explains the places where the search nearly succeeded.
"""

from collections.abc import Callable, Iterator

from torch.fx import Node

from atomc.graph.canonical import COMMUTATIVE, VIEWS, call, keeps_last_dim, readers, value
from atomc.matching.attributes import compare_attrs
from atomc.matching.conditions import problems
from atomc.matching.pattern import Difference, Index, Pattern, Site


def _no_veto(*_: str) -> bool:
    return False


def unify(site: Site, pairs: list[tuple[Node, Node]]) -> Iterator[Site]:
    """Every way to make the pattern node of each pair be its graph node. The site is changed and changed back."""
    if not pairs:
        yield site
        return
    (p, g), rest = pairs[0], pairs[1:]

    def attempt(more: list[tuple[Node, Node]], bind: Callable[[], bool]) -> Iterator[Site]:
        saved = site.saved()
        if bind():
            yield from unify(site, more + rest)
        site.restore(saved)

    def skip() -> bool:
        site.skipped.append(g)
        return True

    if not isinstance(g, Node):
        return
    see_through = site.pattern.sees_through and call(g).op in VIEWS and keeps_last_dim(g)
    if site.at(p) is not None:
        if site.at(p) is g:
            yield from unify(site, rest)
        elif see_through:
            yield from attempt([(p, call(g).operands[0])], skip)
        return
    if p in site.pattern.inputs:
        name = site.pattern.inputs[p]
        if name not in site.bound:
            yield from attempt([], lambda: site.bound.setdefault(name, g) is g)
        elif site.bound[name] is g:
            yield from unify(site, rest)
        return
    wanted, found = call(p), call(g)

    def place() -> bool:
        site.matched[p] = g
        return compare_attrs(site, p, g, _no_veto)

    if wanted.op == found.op and len(wanted.operands) == len(found.operands) and g not in site.matched.values():
        yield from attempt(list(zip(wanted.operands, found.operands, strict=True)), place)
        if wanted.op in COMMUTATIVE and len(wanted.operands) == 2:
            yield from attempt(list(zip(wanted.operands, reversed(found.operands), strict=True)), place)
    if wanted.op == "cast" and found.op != "cast":
        yield from attempt([(wanted.operands[0], g)], lambda: without_cast(site, p, g))
    if see_through and wanted.op not in VIEWS:
        yield from attempt([(p, found.operands[0])], skip)


def without_cast(site: Site, p: Node, g: Node) -> bool:
    """The pattern casts, the graph need not because g has that dtype already (checked once all is bound)."""
    site.alias[p] = g
    site.deferred.append((p, g, "dtype", call(p).attrs["dtype"], value(g).dtype))
    return True


def _candidates(site: Site, output: Node) -> list[Node]:
    """Graph nodes that could be a further output, reached over the readers of what is matched."""
    op = call(output).op
    taken = set(site.matched.values())
    if site.pattern.read_together:
        first = next(node for node in site.outputs())
        order = next(i for i, o in enumerate(site.pattern.outputs) if site.at(o) is first)
        wanted_later = site.pattern.outputs.index(output) > order
        together = []
        for reader in first.users:
            operands = call(reader).operands
            if first in operands:
                at = operands.index(first)
                together += operands[at + 1:] if wanted_later else operands[:at]
        found = [node for operand in together for node in _through_cache(operand, op)]
        return [node for node in dict.fromkeys(found) if node not in taken]

    def reading(node: Node) -> Iterator[Node]:
        for user in readers(node):
            yield user
            if site.pattern.sees_through and call(user).op in VIEWS and keeps_last_dim(user):
                yield from user.users

    def reached(p: Node) -> list[Node]:
        here = site.at(p)
        if here is not None:
            return [here]
        if p in site.pattern.inputs:
            bound = site.bound.get(site.pattern.inputs[p])
            return [bound] if isinstance(bound, Node) else []
        return [user for operand in call(p).operands for node in reached(operand) for user in reading(node)
                if call(user).op == call(p).op and user not in taken]

    return list(dict.fromkeys(reached(output)))


def _through_cache(node: Node, op: str, depth: int = 4) -> Iterator[Node]:
    """The node itself if it is a call of `op`, else what of that kind was written to the cache that it is a view of."""
    here = call(node)
    if here.op == op:
        yield node
    elif depth and here.op in ("permute", "view", "slice", "index_copy"):
        for operand in here.operands:
            yield from _through_cache(operand, op, depth - 1)


def _complete(site: Site) -> Iterator[Site]:
    missing = next((output for output in site.pattern.outputs if site.at(output) is None), None)
    if missing is None:
        yield site
        return
    for candidate in _candidates(site, missing):
        for grown in unify(site, [(missing, candidate)]):
            yield from _complete(grown)


def matches(pattern: Pattern, index: Index) -> Iterator[tuple[Site, list[Difference]]]:
    """Every place where the structure fits, with what forbids the rewrite there (nothing: it may be rewritten)."""
    root = min(pattern.outputs, key=lambda output: len(index[call(output).op]))
    starts = list(index[call(root).op])
    if call(root).op == "cast":  # where the model's dtype is right already, the last cast is not there
        starts += index[call(call(root).operands[0]).op]
    for start in starts:
        # The last cast may vanish at a node that is itself followed by a cast: take the first way that may be rewritten.
        best: tuple[Site, list[Difference]] | None = None
        for site in unify(Site(pattern), [(root, start)]):
            done = next(_complete(site), None)
            if done is None:
                continue
            found = Site(pattern)
            found.restore(done.saved())
            wrong = problems(found)
            if best is None or not wrong:
                best = found, wrong
            if not wrong:
                break
        if best is not None:
            yield best
