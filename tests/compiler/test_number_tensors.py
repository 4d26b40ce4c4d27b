"""Integers that int64 tensors are added to or compared with enter a graph as tensors."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, StaticCache

from atomc.compiler.number_tensors import number_tensors


def inputs_of_calls(function, *calls):
    """The integers, and the values of additional tensors, that the graph gets in each call, after
    checking the results.
    """
    seen = []

    def backend(gm, example_inputs):
        changed = number_tensors(gm, example_inputs)

        def graph(*args):
            numbers = [x for x in args if isinstance(x, int)]
            seen.append((numbers, [int(x) for x in args[len(example_inputs) :]]))
            return changed.gm(*args)

        return changed.wrap(graph)

    torch._dynamo.reset()
    compiled = torch.compile(function, backend=backend, dynamic=True)
    for args in calls:
        for result, expected in zip(compiled(*args), function(*args), strict=True):
            assert type(result) is type(expected)
            torch.testing.assert_close(result, expected, rtol=0, atol=0)
    return seen


POSITIONS = torch.arange(5)
CALLS = [(POSITIONS, number) for number in (2, 3, 4, 9)]


@pytest.mark.parametrize(
    "function, numbers",
    [
        (lambda x, n: (x + n, n + 1), [[2], [3], [4], [9]]),
        (lambda x, n: (n - x,), [[2], [3], [4], [9]]),
        (lambda x, n: (x < n * 2, n), [[4], [6], [8], [18]]),
        (lambda x, n: (x + n, x + max(n - 3, 0)), [[2, 0], [3, 0], [4, 1], [9, 6]]),
        (lambda x, n: (x + n, (x * 2) == n), [[2], [3], [4], [9]]),
    ],
    ids=["counter", "minus", "compared", "computed", "read twice"],
)
def test_an_integer_beside_int64_tensors_is_a_tensor(function, numbers):
    seen = inputs_of_calls(function, *CALLS)
    assert [tensors for _, tensors in seen] == numbers


@pytest.mark.parametrize(
    "function",
    [
        lambda x, n: (x.float() * n,),
        lambda x, n: (x.to(torch.int32) + n,),
        lambda x, n: (x + n, x[: n % 3]),
        lambda x, n: (x + n, torch.full((n,), 1.0)),
        lambda x, n: (x + n, x[:4].view(n % 2 + 1, -1)),
        lambda x, n: (x.sum() + n,),
        lambda x, n: (x // n,),
        lambda x, n: (x + (n - n), torch.sym_ite(n - n > 1, n, n + 1)),
    ],
    ids=["float", "int32", "slice", "size", "view", "no dimension", "other op", "constant"],
)
def test_an_integer_that_a_tensor_would_not_equal_stays_one(function):
    seen = inputs_of_calls(function, *CALLS)
    assert [tensors for _, tensors in seen] == [[]] * 4


@pytest.mark.parametrize(
    "name", ["gemma3_text", pytest.param("mistral", marks=pytest.mark.rotating)]
)
def test_decoding_with_a_static_cache_is_one_kind_of_call(name, repeated):
    """Their sliding layers count tokens in an integer, from which the graph computes positions."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    config = AutoConfig.for_model(name, sliding_window=8, **sizes, **heads)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    compiled = torch.compile(model, backend="atom", options={"cache": False, "strict": True})
    ids = torch.randint(0, 64, (1, 22))

    def steps(function):
        cache = StaticCache(config=config, max_cache_len=32)
        with torch.no_grad():
            model(ids[:, :6], past_key_values=cache, use_cache=True)
            return [
                function(ids[:, i : i + 1].clone(), past_key_values=cache, use_cache=True).logits
                for i in range(6, 22)  # beyond the window
            ]

    for result, expected in zip(steps(compiled), steps(model), strict=True):
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)
    kinds = [[*one.tapes.values()] for one in repeated]
    assert all(len(tapes) <= 1 for tapes in kinds)
    assert any(tapes and tapes[0] for tapes in kinds)
