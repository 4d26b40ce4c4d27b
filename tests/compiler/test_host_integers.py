"""Integers that only integers among a graph's outputs depend on: the host computes those."""

import pytest
import torch

from atomc.compiler.host_integers import compute_on_host


def integers_of_calls(function, *calls):
    """The integers that the graph itself gets in each call, after checking the results."""
    seen = []

    def backend(gm, example_inputs):
        def graph(*args):
            seen.append([x for x in args if isinstance(x, int)])
            return gm(*args)

        return compute_on_host(gm, example_inputs, graph)

    torch._dynamo.reset()
    compiled = torch.compile(function, backend=backend, dynamic=True)
    for args in calls:
        for result, expected in zip(compiled(*args), function(*args), strict=True):
            assert type(result) is type(expected)
            torch.testing.assert_close(result, expected, rtol=0, atol=0)
    return seen


X = torch.randn(3, 4)
CALLS = [(X, number) for number in (2, 3, 4, 9)]


@pytest.mark.parametrize(
    "function",
    [
        lambda x, n: (x + 1, n + 1),
        lambda x, n: (x + 1, n),
        lambda x, n: (n * 2 - 1, x + 1, n // 2, n),
    ],
    ids=["counter", "unchanged", "several"],
)
def test_a_counter_is_the_same_for_the_graph_and_counts_for_the_caller(function):
    seen = integers_of_calls(function, *CALLS)
    assert seen == [seen[0]] * 4


@pytest.mark.parametrize(
    "function",
    [
        lambda x, n: (x + n, n + 1),
        lambda x, n: (x.repeat(n, 1), n + 1),
        lambda x, n: (x[: n % 3], n + 1),
        lambda x, n: (x + 1, torch.full((n,), 1.0), n + 1),
    ],
    ids=["operand", "repeats", "slice", "size"],
)
def test_an_integer_that_a_tensor_depends_on_reaches_the_graph(function):
    seen = integers_of_calls(function, *CALLS)
    assert len({tuple(numbers) for numbers in seen}) == 4


def test_the_size_of_an_input_reaches_the_graph():
    calls = [(torch.randn(n, 4), n) for n in (2, 3, 5)]
    seen = integers_of_calls(lambda x, n: (x.view(n, 2, 2) * 2, n + 1), *calls)
    assert all(n in numbers for (_, n), numbers in zip(calls, seen, strict=True))


def test_two_counters_are_told_apart():
    calls = [(X, a, b) for a, b in ((2, 7), (3, 5), (4, 4))]
    integers_of_calls(lambda x, a, b: (x * 2, a + 1, b - 1, a * b), *calls)
    seen = integers_of_calls(lambda x, a, b: (x * a, a + 1, b - 1), *calls)
    assert all(a in numbers for (_, a, _), numbers in zip(calls, seen, strict=True))
