"""The cases of a marked test that run per change cover its values, and a seed draws one more; of
rotating tests a seed draws a share.
"""

from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
from covering import (
    cases_left_out,
    covering_cases,
    function_id,
    rotating_left_out,
    values_of,
)


def indices(*numbers: int) -> list[dict[str, int]]:
    """Of each case of a product: the number of the value of each parameter."""
    names = "abcd"
    return [
        dict(zip(names, values, strict=False)) for values in product(*(range(n) for n in numbers))
    ]


@pytest.mark.parametrize(
    ("numbers", "cases"), [((4,), 1), ((4, 3), 4), ((1, 4), 1), ((2, 2, 2), 4), ((3, 3, 3), 10)]
)
def test_fixed_cases_cover_values_and_pairs_of_three(numbers: tuple[int, ...], cases: int) -> None:
    all_cases = indices(*numbers)
    fixed = [all_cases[turn] for turn in covering_cases(all_cases)]
    assert len(fixed) == cases
    if len(numbers) == 2 and min(numbers) > 1:
        assert all({case[n] for case in fixed} == {c[n] for c in all_cases} for n in all_cases[0])
    if len(numbers) > 2:
        pairs = set(product(range(numbers[0]), range(numbers[1])))
        assert {(case["a"], case["b"]) for case in fixed} == pairs


def test_parameters_that_change_together_are_one() -> None:
    assert covering_cases([{"scheme": n, "limit": n, "same": 0} for n in range(3)]) == {0}


@pytest.mark.parametrize("first, second", [(True, [1]), (False, [2])])
@pytest.mark.parametrize("third", [1, True, ([3],)])
def test_values_of_a_case_are_numbered_by_decorators(
    first: bool, second: list[int], third: Any, request: pytest.FixtureRequest
) -> None:
    name = function_id(request.node)
    cases = [item for item in request.session.items if function_id(item) == name]
    if len(cases) < 6:
        pytest.skip("a part of the tests is selected")
    values = [values_of(item) for item in cases]
    assert [len({case[name] for case in values}) for name in ("first", "third")] == [2, 3]
    assert all(case["first"] == case["second"] for case in values)
    assert len(covering_cases(values)) == 3


@pytest.mark.covering
@pytest.mark.parametrize("case", range(6))
def test_a_marked_case(case: int) -> None:
    assert case in range(6)


def test_the_first_case_runs_and_one_that_the_seed_draws(request: pytest.FixtureRequest) -> None:
    here = [item for item in request.session.items if item.path == request.path]
    cases = [item for item in here if item.name.startswith("test_a_marked_case")]
    if request.config.option.keyword or request.config.option.markexpr != "not slow":
        pytest.skip("a part of the tests is selected, or all of them")
    assert len(cases) == 2 and cases[0].name == "test_a_marked_case[0]"


def item_of(request: pytest.FixtureRequest, name: str) -> Any:
    parent = request.node.parent
    return pytest.Function.from_parent(parent, name=name, callobj=lambda: None)


def test_each_seed_draws_a_share_of_the_rotating_tests_with_all_their_cases(
    request: pytest.FixtureRequest,
) -> None:
    names = [f"test_{number}" for number in range(60)]
    items = [item_of(request, f"{name}{case}") for name in names for case in ("[a]", "[b]", "")]
    rotating = items[:150]
    for item in rotating:
        item.add_marker(pytest.mark.rotating)
    runs = []
    for seed in range(20):
        left_out = rotating_left_out(items, seed, 3)
        assert set(left_out) <= set(rotating)
        drawn = [item.name for item in rotating if item not in left_out]
        assert drawn == [
            f"{name}{case}" for name in names if name in drawn for case in ("[a]", "[b]", "")
        ]
        runs.append(drawn)
    share = sum(map(len, runs)) / (20 * len(rotating))
    assert abs(share - 1 / 3) < 0.1
    assert {name for drawn in runs for name in drawn} == {item.name for item in rotating}
    assert rotating_left_out(items, 0, 1) == []


def test_cases_that_rotate_by_themselves_run_at_one_change_in_as_many_as_their_mark_says(
    request: pytest.FixtureRequest,
) -> None:
    items = [item_of(request, f"test_one[{number}]") for number in range(60)]
    for item in items:
        item.add_marker(pytest.mark.rotating(each_case=3))
        item.add_marker(pytest.mark.xdist_group("a fixture"))
    runs = [
        {item.name for item in items if item not in rotating_left_out(items, seed, 6)}
        for seed in range(20)
    ]
    assert all(len(run) < 40 for run in runs)
    assert abs(sum(map(len, runs)) / (20 * len(items)) - 1 / 3) < 0.1
    assert set().union(*runs) == {item.name for item in items}
    assert rotating_left_out(items, 0, 1) == []


def test_rotating_tests_of_a_group_are_drawn_together(request: pytest.FixtureRequest) -> None:
    items = [item_of(request, f"test_{number}") for number in range(20)]
    for item in items:
        item.add_marker(pytest.mark.rotating)
        item.add_marker(pytest.mark.xdist_group("a fixture"))
    sizes = {len(rotating_left_out(items, seed, 4)) for seed in range(20)}
    assert sizes == {0, len(items)}


def test_other_seeds_draw_other_cases(request: pytest.FixtureRequest) -> None:
    def case(number: int) -> pytest.Item:
        item = item_of(request, f"case[{number}]")
        item.callspec = SimpleNamespace(indices={"case": number})
        item.add_marker(pytest.mark.covering)
        return item

    cases = [case(number) for number in range(6)]
    left_out = [cases_left_out(cases, seed) for seed in range(20)]
    assert all(len(others) == 4 and cases[0] not in others for others in left_out)
    assert len({tuple(item.name for item in others) for others in left_out}) > 2
    cases[1].add_marker(pytest.mark.slow)  # it is left out already
    assert all(cases[1] not in cases_left_out(cases, seed) for seed in range(5))
