"""Which rewrite makes the difference: the program with ever fewer of them, half of what is left at a time."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from atomc.audit.sites import Place

# These cannot be left out: the runtime needs the one, and every op is given to something by the other.
FIXED = ("bind_state", "lower")


@dataclass(frozen=True)
class Blame:
    """What causes a difference. rewrite: "" if the difference stays without any of them.

    module_path  the one place that causes it; None if it takes more than one
    places       how many the rewrite has
    runs         of the graph, to find it
    passes       the option that leaves it out, if one can
    """

    rewrite: str
    module_path: str | None
    places: int
    runs: int
    passes: dict[str, bool | list[str]]


def blame(
    run: Callable[[Sequence[Place]], float], ranked: Sequence[Place], order: Sequence[str], bound: float,
    known: Collection[str] = (),
) -> Blame:  # fmt: skip
    """Find the first rewrite with which the difference passes the bound.

    run     the difference with these places left out; that with none left out is beyond the bound
    ranked  all places, the one with the largest error of its own first
    order   their rewrites, in the order in which they ran
    known   the names of all passes

    Takes at most log2(len(order)) + 2 runs, of which the last tells whether the worst place alone is the cause.
    """
    few, many, runs = 0, len(order), 0  # beyond the bound with the first `many` rewrites
    while few < many:
        middle = (few + many) // 2
        runs += 1
        if run([place for place in ranked if place.rewrite in order[middle:]]) > bound:
            many = middle
        else:
            few = middle + 1
    if not many:
        return Blame("", None, 0, runs, {})
    rewrite = order[many - 1]
    places = [place for place in ranked if place.rewrite == rewrite]
    alone = len(places) == 1 or run(places[:1]) <= bound
    path = places[0].module_path if alone else None
    return Blame(rewrite, path, len(places), runs + (len(places) > 1), left_out(places[0], path, known))


def left_out(place: Place, path: str | None, known: Collection[str]) -> dict[str, bool | list[str]]:
    """The option `passes` without what made a place, in one module or everywhere; nothing if it cannot be left out."""
    if place.rewrite in FIXED:
        return {}
    # What is not lifted is recognised again.
    names = [place.rewrite, *([place.op] if place.rewrite == "lift" and place.op in known else [])]
    return {name: False if path is None else [path] for name in names}
