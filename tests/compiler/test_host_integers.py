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

        return compute_on_host(gm, graph)

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


@pytest.mark.parametrize(
    "function",
    [lambda x: (x * 2, x.shape[0] + 1), lambda x: (x * 2,)],
    ids=["in the outputs", "unread"],
)
def test_a_size_that_no_op_reads_reaches_the_graph(function):
    calls = [(torch.randn(n, 4),) for n in (2, 3, 5)]
    seen = integers_of_calls(function, *calls)
    assert [numbers for numbers in seen if 5 in numbers] == [seen[-1]]
    assert all(n in numbers for (x,), numbers in zip(calls, seen, strict=True) if (n := len(x)) > 2)


def test_the_backend_follows_a_size_that_is_returned():
    def function(x):
        return torch.sin(x).cos() * x.cumsum(0), x.shape[0] + 1

    compiled = torch.compile(function, backend="atom", dynamic=True, options={"cache": False})
    for n in (2, 3, 5, 9):
        x = torch.randn(n, 4)
        result, number = compiled(x)
        torch.testing.assert_close(result, function(x)[0])
        assert number == n + 1


def test_two_counters_are_told_apart():
    calls = [(X, a, b) for a, b in ((2, 7), (3, 5), (4, 4))]
    integers_of_calls(lambda x, a, b: (x * 2, a + 1, b - 1, a * b), *calls)
    seen = integers_of_calls(lambda x, a, b: (x * a, a + 1, b - 1), *calls)
    assert all(a in numbers for (_, a, _), numbers in zip(calls, seen, strict=True))
