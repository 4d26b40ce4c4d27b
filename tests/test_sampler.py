"""Tokens from logits: exact, distributed as promised, and independent of the batch."""

import pytest
import torch

from atomc.runtime.draw import Draw, uniform
from atomc.runtime.sampler import sample
from atomc.runtime.sampling_params import SamplingParams

# Probabilities 0.5, 0.25, 0.15, 0.1 at ids 2, 0, 3, 1, and an impossible id 4.
LOGITS = torch.tensor([0.25, 0.1, 0.5, 0.15, 0.0]).log()


def ids_at(uniforms, **params):
    draws = [Draw(uniform=u, **{"temperature": 1.0, **params}) for u in uniforms]
    return sample(LOGITS.expand(len(draws), -1), draws).tolist()


def test_greedy_is_the_first_of_the_largest():
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0], [5.0, -1.0, 5.0, 0.0]])
    assert sample(logits, [Draw(), Draw()]).tolist() == [1, 0]


def test_greedy_reads_bf16_logits_as_they_are():
    logits = torch.randn(4, 1000, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert sample(logits, [Draw()] * 4).tolist() == logits.argmax(-1).tolist()


def test_the_number_picks_a_token_by_its_share_of_the_mass():
    assert ids_at([0.0, 0.2499, 0.2501, 0.34, 0.36, 0.84, 0.86, 1 - 2**-53]) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_temperature_sharpens_and_flattens():
    grid = [(i + 0.5) / 1000 for i in range(1000)]
    for temperature in (0.5, 1.0, 2.0):
        expected = (LOGITS / temperature).softmax(-1)
        counts = torch.tensor(ids_at(grid, temperature=temperature)).bincount(minlength=5) / 1000
        assert torch.allclose(counts, expected, atol=2e-3)


def test_the_smallest_temperature_is_greedy():
    assert ids_at([0.0, 0.5, 0.999], temperature=1e-4) == [2, 2, 2]


def test_top_k_leaves_the_most_likely_renormalised():
    assert ids_at([0.0, 0.66, 0.67, 1 - 2**-53], top_k=2) == [2, 2, 0, 0]
    assert ids_at([0.0, 0.5, 1 - 2**-53], top_k=1) == [2, 2, 2]


def test_top_k_above_the_vocabulary_leaves_all():
    grid = [(i + 0.5) / 100 for i in range(100)]
    assert set(ids_at(grid, top_k=1000)) == {0, 1, 2, 3}


def test_top_p_leaves_the_fewest_that_reach_it():
    assert set(ids_at([0.0, 0.3, 0.999], top_p=0.4)) == {2}
    assert ids_at([0.0, 0.66, 0.67, 1 - 2**-53], top_p=0.6) == [2, 2, 0, 0]
    assert set(ids_at([0.0, 0.3, 0.999], top_p=1e-9)) == {2}


def test_top_p_counts_what_top_k_left():
    # Of the 0.75 that top_k=2 leaves, id 2 has two thirds.
    assert set(ids_at([0.0, 0.999], top_k=2, top_p=0.6)) == {2}
    assert set(ids_at([0.0, 0.999], top_k=2, top_p=0.7)) == {2, 0}


def test_large_logits_do_not_overflow():
    logits = torch.tensor([[1e30, -1e30, 1e30]])
    assert {sample(logits, [Draw(0.01, uniform=u)]).item() for u in (0.1, 0.9)} == {0, 2}


def test_a_row_draws_the_same_token_in_any_batch():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(40, 3001, generator=generator) * 3
    kinds = [Draw(), Draw(1.0), Draw(0.7, 20), Draw(1.3, 0, 0.8), Draw(0.9, 50, 0.95)]
    draws = [Draw(k.temperature, k.top_k, k.top_p, uniform(7, i)) for i in range(8) for k in kinds]
    together = sample(logits, draws).tolist()
    assert [sample(logits[i : i + 1], draws[i : i + 1]).item() for i in range(40)] == together
    order = torch.randperm(40, generator=generator)
    assert sample(logits[order], [draws[i] for i in order]).tolist() == [together[i] for i in order]


@pytest.mark.gpu
def test_a_gpu_draws_the_tokens_of_a_cpu():
    logits = torch.randn(64, 5000, generator=torch.Generator().manual_seed(0)) * 3
    kinds = [Draw(), Draw(1.0), Draw(0.7, 20), Draw(0.9, 50, 0.95)]
    draws = [Draw(k.temperature, k.top_k, k.top_p, uniform(7, i)) for i in range(16) for k in kinds]
    assert sample(logits.cuda(), draws).tolist() == sample(logits, draws).tolist()


def test_uniform_numbers_depend_on_seed_and_index_and_fill_the_interval():
    assert uniform(5, 3) == uniform(5, 3)
    assert len({uniform(seed, index) for seed in range(50) for index in range(50)}) == 2500
    # The numbers of one stream, and the first numbers of seeds that users would take.
    for numbers in ([uniform(0, i) for i in range(20000)], [uniform(seed, 0) for seed in range(20000)]):
        assert all(0.0 <= number < 1.0 for number in numbers)
        counts = torch.tensor(numbers).mul(10).long().bincount(minlength=10)
        assert counts.min() > 1800 and counts.max() < 2200


def test_uniform_numbers_are_those_of_splitmix64():
    # The published stream of seed 0, whose state the seed's own mixing leaves at 0.
    expected = (0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F)
    assert [uniform(0, i) for i in range(3)] == [(value >> 11) * 2.0**-53 for value in expected]


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"temperature": -1.0}, "temperature is -1.0, it must be 0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": 1e-9}, "temperature is 1e-09"),
        ({"top_k": -1}, "top_k is -1, it must be 0"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"stop_token_ids": (-1,)}, "stop_token_ids is"),
    ],
)
def test_parameters_out_of_range_are_refused(params, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**params)
