"""Which tests of several seconds run per change: the markers `covering` and `rotating`. All of them
run under `make test-all`.

covering   of the cases of a test, fixed: few in which all values of its parameters occur, and from
           three parameters on all pairs of values; of a test with one parameter, the first case.
           Drawn by --grid-seed: one of the others. A new case needs no entry.
rotating   a test, or what remains of its cases, at one change in --rotation, drawn by --grid-seed:
           for tests of what other, shorter ones test in parts. Those of an xdist_group, which share
           a fixture, are drawn together. rotating(each_case=3): each case by itself, at one change
           in three, for many cases of one kind.
"""

import random
from collections.abc import Hashable, Mapping, Sequence
from itertools import combinations
from typing import Any

import pytest


def rotating_left_out(items: list[pytest.Item], seed: int, rotation: int) -> list[pytest.Item]:
    """The tests marked `rotating` that do not run at this change."""
    left_out = []
    for item in items:
        if mark := item.get_closest_marker("rotating"):
            group = item.get_closest_marker("xdist_group")
            drawn_as, turns = str(group.args[0]) if group else function_id(item), rotation
            if each_case := mark.kwargs.get("each_case"):
                drawn_as, turns = item.nodeid, min(each_case, rotation)
            if random.Random(f"{seed} {drawn_as}").randrange(turns):
                left_out.append(item)
    return left_out


def function_id(item: pytest.Item) -> str:
    """The node id without the case."""
    return item.nodeid.partition("[")[0]


def cases_left_out(items: list[pytest.Item], seed: int) -> list[pytest.Item]:
    """The cases of marked tests that do not run per change."""
    by_test: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("covering") and not item.get_closest_marker("slow"):
            by_test.setdefault(function_id(item), []).append(item)
    left_out = []
    for name, cases in by_test.items():
        fixed = covering_cases([values_of(case) for case in cases])
        others = [case for turn, case in enumerate(cases) if turn not in fixed]
        drawn = random.Random(f"{seed} {name}").choice(others) if others else None
        left_out += [case for case in others if case is not drawn]
    return left_out


def values_of(case: pytest.Item) -> dict[str, Hashable]:
    """What each parameter has in a case; of several that one decorator lists, together. (pytest 9
    numbers the cases in callspec.indices, not the values, but for those of fixtures.)
    """
    spec = case.callspec  # type: ignore[attr-defined]
    values: dict[str, Hashable] = dict(spec.indices)
    for mark in case.iter_markers("parametrize"):
        names = mark.args[0].split(",") if isinstance(mark.args[0], str) else mark.args[0]
        value = tuple(_hashed(spec.params[name.strip()]) for name in names)
        values |= {name.strip(): value for name in names}
    return values


def _hashed(value: Any) -> Hashable:
    try:
        hash(value)
    except TypeError:
        return id(value)
    return type(value), value  # 1 is not True


def covering_cases(cases: Sequence[Mapping[str, Hashable]]) -> set[int]:
    """Cases in which all values, or pairs of them, occur, given which value each parameter has in
    each case: at each turn the first of those with most that has not occurred.
    """
    columns: dict[tuple[Hashable, ...], str] = {}
    for name in cases[0]:  # parameters that change together are one
        column = tuple(values[name] for values in cases)
        if len(set(column)) > 1:
            columns[column] = name
    strength = max(0, min(len(columns) - 1, 2))
    parts = [
        set(combinations([(name, column[turn]) for column, name in columns.items()], strength))
        for turn in range(len(cases))
    ]
    missing, fixed = set().union(*parts), set()
    while missing:
        best = max(range(len(parts)), key=lambda turn: len(parts[turn] & missing))
        fixed.add(best)
        missing -= parts[best]
    return fixed
