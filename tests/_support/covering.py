"""Which cases of a test run per change, where each takes seconds: the marker `covering`.

Fixed: few cases in which all values of its parameters occur, and from three parameters on all pairs
of values; of a test with one parameter, the first case. Drawn: one of the others, by
--grid-seed. All of them run under `make test-all`. A new case needs no entry.
"""

import random
from itertools import combinations

import pytest


def cases_left_out(items: list[pytest.Item], seed: int) -> list[pytest.Item]:
    """The cases of marked tests that do not run per change."""
    by_test: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("covering") and not item.get_closest_marker("slow"):
            by_test.setdefault(item.nodeid.partition("[")[0], []).append(item)
    left_out = []
    for name, cases in by_test.items():
        indices = [case.callspec.indices for case in cases]  # type: ignore[attr-defined]
        fixed = covering_cases(indices)
        others = [case for turn, case in enumerate(cases) if turn not in fixed]
        drawn = random.Random(f"{seed} {name}").choice(others) if others else None
        left_out += [case for case in others if case is not drawn]
    return left_out


def covering_cases(indices: list[dict[str, int]]) -> set[int]:
    """Cases in which all values, or pairs of them, occur, given which value each parameter has in
    each case: at each turn the first of those with most that has not occurred.
    """
    columns: dict[tuple[int, ...], str] = {}
    for name in indices[0]:  # parameters that change together are one
        column = tuple(values[name] for values in indices)
        if len(set(column)) > 1:
            columns[column] = name
    strength = max(0, min(len(columns) - 1, 2))
    parts = [
        set(combinations([(name, column[turn]) for column, name in columns.items()], strength))
        for turn in range(len(indices))
    ]
    missing, chosen = set().union(*parts), set()
    while missing:
        best = max(range(len(parts)), key=lambda turn: len(parts[turn] & missing))
        chosen.add(best)
        missing -= parts[best]
    return chosen
