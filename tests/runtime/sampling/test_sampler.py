"""Tokens from logits: exact, distributed as promised, and independent of the batch."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atomc.runtime.requests.sample_spec import RequestCounts, SampleSpec, uniform
from atomc.runtime.requests.sampling_params import SamplingParams
from atomc.runtime.sampling.inverse_transform import inverse_transform
from atomc.runtime.sampling.row_logprobs import logprobs
from atomc.runtime.sampling.sampler import Sampler

CPU = torch.device("cpu")
# Probabilities 0.5, 0.25, 0.15, 0.1 at ids 2, 0, 3, 1, and an impossible id 4.
LOGITS = torch.tensor([0.25, 0.1, 0.5, 0.15, 0.0]).log()
GRID = [(i + 0.5) / 1000 for i in range(1000)]


def sample(logits, draws, **given):
    return Sampler(logits.device, len(draws))(logits, draws, **given).tokens


def token_logprobs(sampled):
    """One per row, None where not requested."""
    logprobs = sampled.logprobs
    rows = [] if logprobs is None else logprobs.rows(logprobs.table)
    values = dict(zip(sampled.rows, (row.read() for row in rows), strict=True))
    return [values.get(row) for row in range(len(sampled.tokens))]


def drawn(**params):
    return SampleSpec(params=SamplingParams(**params))


def ids_at(numbers, logits=LOGITS, **params):
    params = SamplingParams(**{"temperature": 1.0, **params})
    return inverse_transform(
        logits.expand(len(numbers), -1), [params] * len(numbers), np.array(numbers)
    )[0].tolist()


def after(prompt, output, **params):
    """The first draw of a request with these tokens."""
    counts = RequestCounts(len(prompt), [*prompt, *output])
    return SampleSpec(SamplingParams(**params), 0, len(output), len(prompt), counts=counts)


def at(draw, index):
    """A later draw of the same request."""
    return replace(draw, index=index)


def test_greedy_is_the_first_of_the_largest():
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0], [5.0, -1.0, 5.0, 0.0]])
    assert sample(logits, [SampleSpec(), SampleSpec()]).tolist() == [1, 0]


def test_greedy_reads_bf16_logits_as_they_are():
    logits = torch.randn(4, 1000, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert sample(logits, [SampleSpec()] * 4).tolist() == logits.argmax(-1).tolist()


def test_the_number_picks_a_token_by_its_share_of_the_mass():
    assert ids_at([0.0, 0.2499, 0.2501, 0.34, 0.36, 0.84, 0.86, 1 - 2**-53]) == [
        0,
        0,
        1,
        1,
        2,
        2,
        3,
        3,
    ]


def test_temperature_sharpens_and_flattens():
    for temperature in (0.5, 1.0, 2.0):
        expected = (LOGITS / temperature).softmax(-1)
        counts = torch.tensor(ids_at(GRID, temperature=temperature)).bincount(minlength=5) / 1000
        assert torch.allclose(counts, expected, atol=2e-3)


def test_the_smallest_temperature_is_greedy():
    assert ids_at([0.0, 0.5, 0.999], temperature=1e-4) == [2, 2, 2]


def test_top_k_leaves_the_most_likely_renormalised():
    assert ids_at([0.0, 0.3332, 0.3334, 1 - 2**-53], top_k=2) == [0, 0, 2, 2]
    assert ids_at([0.0, 0.5, 1 - 2**-53], top_k=1) == [2, 2, 2]


def test_top_k_above_the_vocabulary_leaves_all():
    assert set(ids_at(GRID, top_k=1000)) == {0, 1, 2, 3}


def test_top_p_leaves_the_fewest_that_reach_it():
    assert set(ids_at(GRID, top_p=0.4)) == {2}
    assert ids_at([0.0, 0.3332, 0.3334, 1 - 2**-53], top_p=0.6) == [0, 0, 2, 2]
    assert set(ids_at(GRID, top_p=1e-9)) == {2}


def test_top_p_counts_what_top_k_left():
    # Of the 0.75 that top_k=2 leaves, id 2 has two thirds.
    assert set(ids_at(GRID, top_k=2, top_p=0.6)) == {2}
    assert set(ids_at(GRID, top_k=2, top_p=0.7)) == {2, 0}


def test_min_p_leaves_what_is_likely_beside_the_most_likely():
    assert set(ids_at(GRID, min_p=0.31)) == {2, 0}
    assert set(ids_at(GRID, min_p=0.29)) == {2, 0, 3}
    assert set(ids_at(GRID, min_p=1.0)) == {2}
    # It does not change what top_p counts: 0.5 and 0.25 reach 0.7 only together.
    assert set(ids_at(GRID, top_p=0.7, min_p=0.31)) == {2, 0}


def test_equals_of_the_last_token_that_a_filter_leaves_stay():
    logits = torch.tensor([0.4, 0.2, 0.2, 0.2]).log()
    assert set(ids_at(GRID, logits, top_k=2)) == {0, 1, 2, 3}
    assert set(ids_at(GRID, logits, top_p=0.5)) == {0, 1, 2, 3}
    assert set(ids_at(GRID, logits, top_k=1)) == {0}


def test_large_logits_do_not_overflow():
    assert ids_at([0.1, 0.9], torch.tensor([1e30, -1e30, 1e30]), temperature=0.01) == [0, 2]


def left(logits, params):
    """Probabilities after the filters, one token at a time: a dict of ids."""
    values = [x / params.temperature for x in logits.tolist()]
    weights = {i: math.exp(x - max(values)) for i, x in enumerate(values)}
    order = sorted(weights, key=lambda i: -weights[i])
    if params.top_k:
        least = weights[order[min(params.top_k, len(order)) - 1]]
        order = [i for i in order if weights[i] >= least]
    mass, total = 0.0, sum(weights[i] for i in order)
    for i in order:
        mass += weights[i]
        if params.top_p < 1.0 and mass >= params.top_p * total:
            order = [j for j in order if weights[j] >= weights[i]]
            break
    kept = {i: weights[i] for i in order if weights[i] >= params.min_p}
    return {i: weight / sum(kept.values()) for i, weight in kept.items()}


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 10**6),
    st.integers(2, 1500),
    st.floats(0.1, 3.0),
    st.integers(0, 40),
    st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.1]),
    st.sampled_from([0.0, 0.01, 0.3]),
    st.floats(0, 1, exclude_max=True),
)
def test_a_token_is_where_the_cumulated_probability_of_what_is_left_passes_the_number(
    seed, V, temperature, top_k, top_p, min_p, number
):
    logits = torch.randn(V, generator=torch.Generator().manual_seed(seed)) * 3
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    kept = left(logits, params)
    (token,) = inverse_transform(logits[None], [params], np.array([number]))[0].tolist()
    before = sum(weight for i, weight in kept.items() if i < token)
    assert token in kept
    assert before - 1e-5 <= number <= before + kept[token] + 1e-5


def test_a_thousand_seeds_draw_the_distribution_of_the_filters():
    logits = torch.randn(12, generator=torch.Generator().manual_seed(3))
    params = SamplingParams(temperature=0.8, top_k=9, top_p=0.95, min_p=0.02)
    expected = left(logits, params)
    draws = [SampleSpec(params=params, seed=seed) for seed in range(4000)]
    counts = sample(logits.expand(len(draws), -1), draws).bincount(minlength=12).tolist()
    assert {i for i, count in enumerate(counts) if count} == expected.keys()
    chi_square = sum((counts[i] - 4000 * p) ** 2 / (4000 * p) for i, p in expected.items())
    assert chi_square < 26.1  # 0.999 of at most 8 degrees of freedom


KINDS = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 20},
    {"temperature": 1.3, "top_p": 0.8},
    {"temperature": 0.9, "top_k": 50, "top_p": 0.95},
    {"temperature": 1.1, "min_p": 0.05},
    {
        "temperature": 1.0,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.3,
    },
    {"logit_bias": {5: 3.0, 6: -100.0}, "min_tokens": 4, "stop_token_ids": (7,)},
    {"temperature": 1.0, "top_p": 0.7, "frequency_penalty": -0.5, "logit_bias": {5: 3.0}},
]


def mixed_draws(count, V):
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, V, (count, 30), generator=generator).tolist()
    return [
        SampleSpec(
            SamplingParams(**KINDS[i % len(KINDS)], logprobs=3),
            i,
            3,
            27,
            counts=RequestCounts(27, list(tokens[i])),
        )
        for i in range(count)
    ]


@pytest.mark.parametrize("V", [40, 3001])
def test_a_row_draws_the_same_token_in_any_batch(V):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(45, V, generator=generator) * 3
    together = Sampler(CPU, 45)(logits, mixed_draws(45, V))
    alone = [
        Sampler(CPU, 1)(logits[i : i + 1], [draw]) for i, draw in enumerate(mixed_draws(45, V))
    ]
    assert [one.tokens.item() for one in alone] == together.tokens.tolist()
    assert [token_logprobs(one)[0] for one in alone] == token_logprobs(together)
    order = torch.randperm(45, generator=generator)
    draws = mixed_draws(45, V)
    assert (
        sample(logits[order], [draws[i] for i in order]).tolist() == together.tokens[order].tolist()
    )


def test_the_kernel_draws_the_same_tokens(monkeypatch):
    pytest.importorskip("triton")
    from atomc.kernels.triton import inverse_transform as kernel

    # Rows of several blocks and of less than one, top_k within the parts and beyond.
    monkeypatch.setattr(kernel, "BLOCK", 64)
    monkeypatch.setattr(kernel, "PARTS", 16)
    kinds = [
        (0.0, 0, 1.0, 0.0),
        (1.0, 0, 1.0, 0.0),
        (0.8, 5, 1.0, 0.0),
        (1.5, 30, 0.9, 0.0),
        (1.2, 0, 0.9, 0.05),
        (1.0, 0, 1.0, 0.2),
    ]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for V, seed in ((130, 0), (50, 1)):
        logits = (
            torch.randn(len(kinds), V, generator=torch.Generator().manual_seed(seed)) * 3
        ).bfloat16()
        draws = [
            SampleSpec(params=SamplingParams(temperature=t, top_k=k, top_p=p, min_p=m), seed=seed)
            for t, k, p, m in kinds
        ]
        numbers = uniform([seed] * len(kinds), [0] * len(kinds))
        rows = [
            (t, min(k or V, V), p, m, number)
            for (t, k, p, m), number in zip(kinds, numbers, strict=True)
        ]
        columns = torch.tensor(rows, dtype=torch.float64, device=device).T.contiguous()
        found, largest = kernel.inverse_transform(logits.to(device), columns, filtered=True)
        assert found.tolist() == sample(logits, draws).tolist()
        assert largest.tolist() == logits.float().amax(-1).tolist()


UNDEFINED = {
    "NaN": [math.nan] * 130,
    "one NaN": [1.0] * 70 + [math.nan] + [0.0] * 59,
    "-NaN": [1.0, -math.nan] * 65,
    "inf": [0.0] * 65 + [math.inf] * 65,
    "-inf": [-math.inf] * 130,
}
# temperature, top_k, top_p, min_p
FILTERS = [
    (0.0, 0, 1.0, 0.0),
    (1.0, 0, 1.0, 0.0),
    (0.8, 5, 1.0, 0.0),
    (1.2, 0, 0.9, 0.05),
    (1.5, 30, 0.9, 0.2),
]


def same(a, b):
    """Equal, also where both are NaN."""
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bad", UNDEFINED.values(), ids=UNDEFINED.keys())
@pytest.mark.parametrize("kinds", [FILTERS, FILTERS[:1]], ids=["random", "greedy"])
def test_rows_without_a_largest_finite_logit_are_told_and_change_no_other_row(
    kinds, bad, dtype, device
):
    logits = (torch.randn(2 * len(kinds), 130, generator=torch.Generator().manual_seed(0)) * 3).to(
        dtype
    )
    logits[::2] = torch.tensor(bad, dtype=dtype)
    draws = [
        SampleSpec(
            params=SamplingParams(temperature=t, top_k=k, top_p=p, min_p=m, logprobs=2), seed=i
        )
        for i, (t, k, p, m) in enumerate(kinds)
        for _ in range(2)
    ]
    found = Sampler(torch.device(device), len(draws))(logits.to(device), draws)
    tokens, tops = found.tokens.cpu(), found.max_logits.cpu().float()
    expected = torch.tensor(bad, dtype=dtype).float().amax().expand(len(kinds))
    assert same(tops[::2], expected) and not tops[::2].isfinite().any()
    assert torch.equal(tops[1::2], logits[1::2].float().amax(-1))
    assert all(0 <= token < 130 for token in tokens.tolist())
    assert tokens[1::2].tolist() == sample(logits[1::2], draws[1::2]).tolist()


@pytest.mark.parametrize("bad", UNDEFINED.values(), ids=UNDEFINED.keys())
def test_the_kernel_tells_rows_without_a_largest_finite_logit(bad, monkeypatch):
    pytest.importorskip("triton")
    from atomc.kernels.triton import inverse_transform as kernel

    monkeypatch.setattr(kernel, "BLOCK", 64)
    monkeypatch.setattr(kernel, "PARTS", 16)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    logits = torch.randn(2 * len(FILTERS), 130, generator=torch.Generator().manual_seed(0)) * 3
    logits[::2] = torch.tensor(bad)
    rows = [(t, min(k or 130, 130), p, m, 0.7) for t, k, p, m in FILTERS for _ in range(2)]
    columns = torch.tensor(rows, dtype=torch.float64, device=device).T.contiguous()
    tokens, tops = (
        found.cpu() for found in kernel.inverse_transform(logits.to(device), columns, filtered=True)
    )
    assert same(tops[::2], torch.tensor(bad).amax().expand(len(FILTERS)))
    assert torch.equal(tops[1::2], logits[1::2].amax(-1))
    assert all(0 <= token < 130 for token in tokens.tolist())
    params = [SamplingParams(temperature=t, top_k=k, top_p=p, min_p=m) for t, k, p, m in FILTERS]
    assert torch.equal(
        tokens[1::2], inverse_transform(logits[1::2], params, np.full(len(params), 0.7))[0]
    )


def test_a_temperature_that_is_infinite_in_fp32_draws_what_a_mask_leaves():
    mask = torch.tensor([[0b1010]] * 40, dtype=torch.int32)
    draws = [SampleSpec(params=SamplingParams(temperature=1e300), seed=seed) for seed in range(40)]
    assert set(sample(torch.randn(40, 5), draws, mask=mask).tolist()) == {1, 3}


def test_drawing_again_without_counting_changes_nothing():
    logits, sampler = torch.tensor([[0.5, 0.4, 0.3, 0.2]]), Sampler(CPU, 4)
    tokens = []
    first = after([0], [], frequency_penalty=1.0)
    for index in range(4):
        draw = at(first, index)
        tried = [sampler.sample(logits, [draw]).tokens.item() for _ in range(2)]
        tokens.append(sampler(logits, [draw]).tokens.item())
        assert tried == [tokens[-1]] * 2
    assert tokens == [0, 1, 2, 3]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_draws_the_tokens_of_a_cpu(dtype):
    logits = (torch.randn(90, 5000, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)
    cpu = Sampler(CPU, 90)(logits, mixed_draws(90, 5000))
    gpu = Sampler(torch.device("cuda"), 90)(logits.cuda(), mixed_draws(90, 5000))
    assert gpu.tokens.tolist() == cpu.tokens.tolist()
    for a, b in zip(token_logprobs(cpu), token_logprobs(gpu), strict=True):
        assert (a.token, a.rank) == (b.token, b.rank) and abs(a.logprob - b.logprob) < 1e-4


def test_uniform_numbers_depend_on_seed_and_index_and_fill_the_interval():
    assert uniform([5], [3]) == uniform([4, 5], [3, 3])[1]
    pairs = [(seed, index) for seed in range(50) for index in range(50)]
    assert len(set(uniform(*zip(*pairs, strict=True)).tolist())) == 2500
    # The numbers of one stream, and the first numbers of seeds that users would take.
    for numbers in (uniform([0] * 20000, range(20000)), uniform(range(20000), [0] * 20000)):
        assert numbers.min() >= 0.0 and numbers.max() < 1.0
        counts = np.histogram(numbers, 10, (0, 1))[0]
        assert counts.min() > 1800 and counts.max() < 2200


def test_uniform_numbers_are_those_of_splitmix64():
    # The published stream of seed 0, whose state the seed's own mixing leaves at 0.
    expected = (0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F)
    assert uniform([0] * 3, range(3)).tolist() == [(value >> 11) * 2.0**-53 for value in expected]


def test_seeds_may_be_negative_or_of_64_bits():
    assert uniform([-1], [0]) == uniform([2**64 - 1], [0]) != uniform([1], [0])


def penalized(
    logits, prompt, output, repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0
):
    """The logits that penalties leave, one token at a time."""
    changed = logits.tolist()
    for i in {*prompt, *output}:
        changed[i] = (
            changed[i] / repetition_penalty if changed[i] > 0 else changed[i] * repetition_penalty
        )
    for i in set(output):
        changed[i] -= presence_penalty + frequency_penalty * output.count(i)
    return torch.tensor(changed)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=8),
    st.lists(st.integers(0, 9), max_size=8),
    st.floats(0.2, 3.0),
    st.floats(-2, 2),
    st.floats(-2, 2),
    st.integers(0, 1000),
)
def test_penalties_change_the_logits_of_tokens_that_came(
    prompt, output, repetition, presence, frequency, seed
):
    given = dict(
        repetition_penalty=repetition, presence_penalty=presence, frequency_penalty=frequency
    )
    logits = torch.randn(10, generator=torch.Generator().manual_seed(seed)) * 2
    changed = Sampler(CPU, 1)._processed(logits[None], [after(prompt, output, **given)], None)[0]
    assert torch.allclose(changed, penalized(logits, prompt, output, **given), atol=1e-5)


def test_penalties_of_the_output_leave_the_prompt_alone():
    logits = torch.tensor([[2.0, 1.5, 0.0]])
    assert sample(logits, [after([0], [], presence_penalty=1.0)]).tolist() == [0]
    assert sample(logits, [after([1], [0], presence_penalty=1.0)]).tolist() == [1]
    assert sample(logits, [after([0], [], repetition_penalty=1.5)]).tolist() == [1]


def test_the_sampler_counts_tokens_that_the_host_does_not_know_yet():
    # Frequency 1: each token is drawn once before any is drawn twice.
    logits, sampler = torch.tensor([[0.5, 0.4, 0.3, 0.2]]), Sampler(CPU, 4)
    first = after([0], [], frequency_penalty=1.0)
    draws = [at(first, index) for index in range(6)]
    assert [sampler(logits, [draw]).tokens.item() for draw in draws] == [0, 1, 2, 3, 0, 1]


def test_counts_of_other_tokens_than_came_before_a_draw_are_not_used():
    logits, sampler = torch.tensor([[0.5, 0.4, 0.3, 0.2]]), Sampler(CPU, 4)
    first = after([0], [0, 0, 0, 1, 2, 2, 3], frequency_penalty=1.0)
    assert sampler(logits, [first]).tokens.tolist() == [1]
    for index in (7, 9):
        with pytest.raises(AssertionError, match=f"does not match {index + 1} tokens"):
            sampler(logits, [at(first, index)])
    with pytest.raises(AssertionError, match="1 of 3 tokens are known"):
        sampler(logits, [at(after([0], [], frequency_penalty=1.0), 2)])


def test_more_requests_come_than_have_counts_at_a_time():
    generator, sampler = torch.Generator().manual_seed(0), Sampler(CPU, 3)
    running: dict[int, tuple[list[int], SampleSpec]] = {}
    for step in range(200):
        while len(running) < 3:
            running[step * 3 + len(running)] = (
                [step % 9],
                after([step % 9], [], frequency_penalty=0.5),
            )
        names = sorted(running)[: 1 + step % 3]
        draws = [at(running[name][1], len(running[name][0]) - 1) for name in names]
        logits = torch.randn(len(names), 9, generator=generator)
        found = sampler(logits, draws).tokens.tolist()
        assert found == [
            penalized(row, [], running[name][0][1:], frequency_penalty=0.5).argmax().item()
            for row, name in zip(logits, names, strict=True)
        ]
        for name, token in zip(names, found, strict=True):
            running[name][0].append(token)
        for name in [name for name in names if len(running[name][0]) > 5 + name % 7]:
            sampler.counts.release(running.pop(name)[1].counts)
    assert len(sampler.counts.output) == 3


def test_bias_is_added_after_penalties():
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    assert sample(logits, [drawn(logit_bias={2: 2.5})]).tolist() == [2]
    assert sample(logits, [drawn(logit_bias={0: -100.0, 1: -100.0})]).tolist() == [2]
    # 2 / 2 + 0.5 is more than 1; (2 + 0.5) / 4 would not be.
    assert sample(
        logits, [after([0], [], repetition_penalty=2.0, logit_bias={0: 0.5})]
    ).tolist() == [0]


def test_nothing_ends_a_request_before_min_tokens():
    logits = torch.tensor([[1.0, 3.0, 2.0, 0.5]])
    draw = SampleSpec(
        params=SamplingParams(min_tokens=2, stop_token_ids=(2,)), eos_ids=frozenset({1})
    )
    assert [sample(logits, [replace(draw, index=index)]).item() for index in range(3)] == [0, 0, 1]
    ignoring = replace(draw.params, ignore_eos=True)
    assert sample(logits, [replace(draw, params=ignoring)]).tolist() == [1]


@pytest.mark.parametrize("V", [5, 32, 70])
def test_a_masked_token_is_never_drawn(V):
    generator = torch.Generator().manual_seed(0)
    allowed = torch.rand(30, V, generator=generator) < 0.3
    allowed[:, 0] |= ~allowed.any(-1)
    words = torch.zeros(30, -(-V // 32) * 32, dtype=torch.int64)
    words[:, :V] = allowed
    mask = (words.view(30, -1, 32) << torch.arange(32)).sum(-1).to(torch.int32)
    logits = torch.randn(30, V, generator=generator)
    draws = [
        SampleSpec(params=SamplingParams(temperature=(i % 2) * 2.0), seed=i) for i in range(30)
    ]
    tokens = sample(logits, draws, mask=mask)
    assert allowed.gather(1, tokens[:, None]).all()
    assert tokens[::2].tolist() == logits.masked_fill(~allowed, -math.inf)[::2].argmax(-1).tolist()


def test_the_given_logits_stay_as_they_are():
    logits = torch.randn(9, 50, generator=torch.Generator().manual_seed(0))
    before = logits.clone()
    sample(logits, mixed_draws(9, 50), mask=torch.full((9, 2), -1, dtype=torch.int32))
    assert torch.equal(logits, before)


def test_logprobs_are_those_of_the_model_whatever_the_filters_are():
    sampled = Sampler(CPU, 2)(
        LOGITS.expand(2, -1), [drawn(logit_bias={1: 5.0}, logprobs=2), drawn()]
    )
    scored, none = token_logprobs(sampled)
    assert none is None and scored.token == 1 and scored.rank == 4
    assert math.isclose(scored.logprob, math.log(0.1), abs_tol=1e-6)
    assert [token for token, _ in scored.top] == [2, 0]
    assert [round(math.exp(value), 5) for _, value in scored.top] == [0.5, 0.25]


def test_logprobs_of_many_rows_are_those_of_each():
    logits = torch.randn(150, 40, generator=torch.Generator().manual_seed(0))
    tokens = torch.arange(150) % 40
    found = logprobs(logits, tokens, [i % 4 for i in range(150)])
    for i, one in enumerate([row.read() for row in found.rows(found.table)]):
        values = logits[i].log_softmax(-1)
        order = values.argsort(descending=True).tolist()
        assert one.token == i % 40 and one.rank == order.index(i % 40) + 1
        assert [token for token, _ in one.top] == order[: i % 4]
        assert math.isclose(one.logprob, values[i % 40].item(), abs_tol=1e-5)
