"""Drafts from earlier text, and tokens that are those of a run without drafts."""

import random

import pytest
import torch

from atomc.runtime.requests.sample_spec import RequestCounts, SampleSpec
from atomc.runtime.requests.sampling_params import SamplingParams
from atomc.runtime.sampling.sampler import Sampler
from atomc.runtime.scheduling.speculative import NGramProposer, accepted

V = 6
CPU = torch.device("cpu")


def test_what_followed_the_same_tokens_is_proposed():
    assert NGramProposer(2, 3).propose([1, 2, 3, 4, 5, 1, 2], 3) == [3, 4, 5]
    assert NGramProposer(2, 3).propose([1, 2, 3, 4, 5, 1, 2], 1) == [3]


def test_the_longest_run_counts_and_then_the_last_one():
    assert NGramProposer(1, 3).propose([1, 2, 3, 7, 2, 3, 8, 1, 2, 3], 1) == [7]
    assert NGramProposer(2, 2).propose([1, 2, 3, 7, 2, 3, 8, 1, 2, 3], 1) == [8]


def test_a_new_end_has_no_proposal():
    assert NGramProposer(2, 3).propose([1, 2, 3, 4], 3) == []
    assert NGramProposer(2, 3).propose([1], 3) == []
    assert NGramProposer(1, 3).propose([1, 2], 3) == []


def test_a_repetition_goes_on():
    assert NGramProposer(1, 3).propose([9, 5, 5, 5], 4) == [5, 5, 5, 5]
    assert NGramProposer(2, 3).propose([1, 2, 3, 1, 2, 3, 1], 7) == [2, 3, 1, 2, 3, 1, 2]


def slow_proposal(tokens, count, shortest, longest):
    for length in range(longest, shortest - 1, -1):
        for end in range(len(tokens) - 1, length - 1, -1):
            if tokens[end - length : end] == tokens[-length:]:
                longer = tokens + [None] * count
                for i in range(count):
                    longer[len(tokens) + i] = longer[end + i]
                return longer[len(tokens) :]
    return []


def test_proposals_are_those_of_a_search_through_everything():
    generator = random.Random(0)
    for _ in range(100):
        shortest = generator.randint(1, 3)
        proposer, longest, tokens = NGramProposer(shortest, shortest + 2), shortest + 2, []
        for _ in range(30):
            tokens += [generator.randrange(3) for _ in range(generator.randint(1, 3))]
            if generator.random() < 0.05:
                del tokens[-5:]
            if tokens:
                assert proposer.propose(tokens, 4) == slow_proposal(tokens, 4, shortest, longest)


class Counted(list):
    """A list that counts how many of its items are read."""

    items = 0

    def __getitem__(self, place):
        found = super().__getitem__(place)
        self.items += len(found) if isinstance(place, slice) else 1
        return found


def test_a_step_reads_only_what_is_new():
    proposer, read = NGramProposer(2, 4), []
    tokens = Counted(range(5_000))
    for token in (5_000, 5_001, 1):
        proposer.propose(tokens, 4)
        read.append(tokens.items)
        tokens.append(token)
        tokens.items = 0
    runs = 2 + 3 + 4
    assert read[0] > runs * 4_900
    assert read[1:] == [
        2 * runs,
        2 * runs,
    ]  # the runs that the new token follows, and those that end with it


def test_tokens_up_to_the_first_wrong_guess_are_accepted():
    assert accepted((4, 5), [4, 5, 6]) == [4, 5, 6]
    assert accepted((4, 5), [4, 7, 6]) == [4, 7]
    # A right guess after a wrong one is right by chance.
    assert accepted((4, 5), [3, 5, 6]) == [3]
    assert accepted((), [9]) == [9]


def model(tokens):
    """Logits after these tokens, of which the last three matter."""
    seed = sum(token * V**i for i, token in enumerate(tokens[-3:]))
    return torch.randn(V, generator=torch.Generator().manual_seed(seed)) * 1.5


def run(params, draft, *, seed=0, sampler=None):
    """The new tokens after [0, 1], with a draft of draft(tokens) at each step; and the number of
    steps.
    """
    tokens, sampler, steps, counts = [0, 1], sampler or Sampler(CPU, 2), 0, RequestCounts(2, [0, 1])
    while len(tokens) < 40:
        guesses = tuple(draft(tokens))
        draws = [
            SampleSpec(params, seed, len(tokens) - 2 + i, 2, draft=guesses[:i], counts=counts)
            for i in range(len(guesses) + 1)
        ]
        logits = torch.stack([model([*tokens, *guesses[:i]]) for i in range(len(guesses) + 1)])
        new = accepted(guesses, sampler(logits, draws).tokens.tolist())
        assert 1 <= len(new) <= len(guesses) + 1
        tokens.extend(new)
        steps += 1
    sampler.counts.release(counts)
    return tokens[2:40], steps


PARAMS = {
    "greedy": {},
    "temperature": {"temperature": 1.0},
    "filters": {"temperature": 0.8, "top_k": 4, "top_p": 0.9, "min_p": 0.05},
    "penalties": {
        "temperature": 1.0,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.7,
    },
    "greedy penalties": {"frequency_penalty": 0.3, "presence_penalty": -0.2},
    "bias": {"temperature": 1.0, "logit_bias": {2: 1.0}, "min_tokens": 9, "stop_token_ids": (3,)},
}


@pytest.mark.parametrize("kind", PARAMS)
def test_tokens_are_those_of_a_run_without_drafts(kind):
    params, generator = SamplingParams(**PARAMS[kind]), random.Random(1)
    plain, steps = run(params, lambda tokens: [])
    assert steps == len(plain)
    for _ in range(10):
        guessed, _ = run(
            params, lambda tokens: [generator.randrange(V) for _ in range(generator.randint(0, 4))]
        )
        assert guessed == plain
    ngram = NGramProposer(1, 2)
    assert run(params, lambda tokens: ngram.propose(tokens, 3))[0] == plain
    # Guesses that are all right: four tokens a step, with the one after the last guess.
    oracle = [0, 1, *plain]
    right, steps = run(params, lambda tokens: oracle[len(tokens) : len(tokens) + 3])
    assert right == plain and steps == -(-len(plain) // 4)


def test_a_guess_is_accepted_as_often_as_it_is_likely_and_else_another_is_drawn():
    params = SamplingParams(temperature=0.9, top_k=5)
    values, _ = (model([0, 1]) / 0.9).sort(descending=True)
    probabilities = (
        (model([0, 1]) / 0.9).masked_fill(model([0, 1]) / 0.9 < values[4], -torch.inf).softmax(-1)
    )
    count, guess = 4000, int(probabilities.argmax())
    draws = [
        SampleSpec(params, seed, i, 2, draft=(guess,)[:i])
        for seed in range(count)
        for i in range(2)
    ]
    logits = torch.stack([model([0, 1]), model([0, 1, guess])]).repeat(count, 1)
    drawn = Sampler(CPU, 1)(logits, draws).tokens.view(count, 2).tolist()
    found = [accepted((guess,), tokens) for tokens in drawn]
    firsts = torch.tensor([new[0] for new in found]).bincount(minlength=V)
    assert all(len(new) == (2 if new[0] == guess else 1) for new in found)
    expected = probabilities * count
    likely = expected > 0
    assert firsts[~likely].sum() == 0
    assert (
        (firsts - expected)[likely] ** 2 / expected[likely]
    ).sum() < 18.5  # 0.999 of 4 degrees of freedom


def test_counts_survive_drafts_and_are_those_of_one_request_though_another_had_their_row():
    params = SamplingParams(temperature=1.0, frequency_penalty=0.8)
    expected = {seed: run(params, lambda tokens: [], seed=seed)[0] for seed in range(3)}
    sampler, generator = Sampler(CPU, 1), random.Random(2)
    for seed in (0, 1, 2, 0, 1, 2):
        found, _ = run(
            params,
            lambda tokens: [generator.randrange(V) for _ in range(2)],
            seed=seed,
            sampler=sampler,
        )
        assert found == expected[seed]
    assert len(sampler.counts.output) == 1
