"""What the scheduler decides, as values, and what holds under random arrivals, lengths and
aborts.
"""

import random
from copy import deepcopy

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from step_results import step_results

from atomc.runtime.execution.slots import Slots
from atomc.runtime.requests.request import Output, Request, siblings
from atomc.runtime.requests.sample_spec import uniform
from atomc.runtime.requests.sampling_params import SamplingParams, Structured
from atomc.runtime.sampling.token_counts import TokenCounts
from atomc.runtime.scheduling import chunks
from atomc.runtime.scheduling import scheduler as module_of_scheduler
from atomc.runtime.scheduling.blocks import BlockPool
from atomc.runtime.scheduling.prefix_cache import first_read
from atomc.runtime.scheduling.scheduler import QueueFull, Scheduler
from atomc.runtime.scheduling.step import Admission, Chunk, DecodeRows, ScheduledStep


def scheduler(
    num_blocks=16,
    block_size=4,
    max_num_seqs=8,
    max_num_batched_tokens=64,
    max_model_len=64,
    shares=False,
    **more,
):
    return Scheduler(
        BlockPool(num_blocks, block_size, shares=shares),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        **more,
    )


def request(name, num_prompt, **params):
    return Request(name, list(range(num_prompt)), SamplingParams(**params))


def shares(chunks):
    """What each request computes: (id, start, number of tokens, whether a token is drawn)."""
    return [
        (chunk.request_id, chunk.start, chunk.num_tokens, bool(chunk.num_samples))
        for chunk in chunks
    ]


def finished(outputs):
    return [output.request_id for output in outputs if output.finish_reason is not None]


def advance(s, token=100):
    """One step in which every spec gives `token`; what it computed, and who finished."""
    step = s.next_step()
    outputs = s.finish_step(step, *step_results(step, token))
    s.check()
    return shares(step.chunks), finished(outputs)


def test_nothing_to_do_is_no_step():
    assert scheduler().next_step() is None


def test_a_step_is_a_value_that_carries_all_it_needs():
    s = scheduler()
    params = SamplingParams(temperature=0.5, top_k=3, top_p=0.9, seed=1)
    s.add(Request("a", [7, 8, 9, 10, 11]))
    s.add(Request("b", [5], params))
    step = s.next_step()
    a, b = Admission(SamplingParams(), 0, 5, frozenset()), Admission(params, 1, 1, frozenset())
    assert step == ScheduledStep(
        (
            Chunk(
                "a",
                0,
                (7, 8, 9, 10, 11),
                0,
                ((0, (0, 1)),),
                num_samples=1,
                num_output_rows=1,
                admission=a,
            ),
            Chunk("b", 1, (5,), 0, ((0, (2,)),), num_samples=1, num_output_rows=1, admission=b),
        )
    )
    assert step.num_tokens == 6


def test_a_request_prefills_then_decodes_one_token_a_step():
    s = scheduler()
    s.add(request("a", 5, max_tokens=3))
    assert advance(s) == ([("a", 0, 5, True)], [])
    assert advance(s) == ([("a", 5, 1, True)], [])
    assert advance(s) == ([("a", 6, 1, True)], ["a"])
    assert s.next_step() is None and s.pool.num_free == 16


def test_a_long_prompt_is_computed_in_chunks_and_draws_once():
    s = scheduler(max_num_batched_tokens=3)
    s.add(request("a", 7, max_tokens=2))
    assert advance(s)[0] == [("a", 0, 3, False)]
    assert advance(s)[0] == [("a", 3, 3, False)]
    assert advance(s)[0] == [("a", 6, 1, True)]
    assert advance(s)[0] == [("a", 7, 1, True)]


def test_running_requests_come_before_new_prompts():
    s = scheduler(max_num_batched_tokens=6)
    s.add(request("a", 4, max_tokens=9))
    assert advance(s)[0] == [("a", 0, 4, True)]
    s.add(request("b", 8))
    assert advance(s)[0] == [("a", 4, 1, True), ("b", 0, 5, False)]
    s.add(request("c", 2))
    assert advance(s)[0] == [("a", 5, 1, True), ("b", 5, 3, True), ("c", 0, 2, True)]


def test_a_limit_of_prompts_leaves_room_for_streams_and_drafts():
    s = scheduler(num_blocks=64)
    s.add(request("a", 4, max_tokens=30))
    advance(s)
    s.add(request("b", 40))
    s.add(request("c", 40))
    s.requests["a"].draft = (100, 100)
    step = s.next_step(10)
    assert shares(step.chunks) == [("a", 4, 3, True), ("b", 0, 10, False)]
    assert (step.num_prompt_tokens, s.num_streams) == (10, 1)
    s.finish_step(step, [[100, 100, 100], ()])
    step = s.next_step(35)
    assert shares(step.chunks) == [("a", 7, 1, True), ("b", 10, 30, True), ("c", 0, 5, False)]
    assert step.num_prompt_tokens == 35 and s.num_streams == 2
    s.finish_step(step, [[100], [100], ()])
    assert shares(s.next_step().chunks)[-1] == ("c", 5, 35, True)


def test_a_budget_below_the_running_requests_serves_the_oldest():
    s = scheduler(max_num_batched_tokens=2)
    for name in "abc":
        s.add(request(name, 1, max_tokens=2))
    assert advance(s)[0] == [("a", 0, 1, True), ("b", 0, 1, True)]
    assert advance(s) == ([("a", 1, 1, True), ("b", 1, 1, True)], ["a", "b"])
    assert advance(s)[0] == [("c", 0, 1, True)]


def test_no_more_sequences_run_than_allowed():
    s = scheduler(max_num_seqs=2)
    for name in "abc":
        s.add(request(name, 2, max_tokens=2))
    assert [name for name, *_ in advance(s)[0]] == ["a", "b"]
    assert advance(s)[1] == ["a", "b"]
    assert [name for name, *_ in advance(s)[0]] == ["c"]


def test_the_newest_gives_way_when_blocks_run_out_and_computes_again():
    s = scheduler(num_blocks=4, block_size=2, max_model_len=8)
    s.add(request("a", 4, max_tokens=3))
    s.add(request("b", 4, max_tokens=3))
    assert advance(s)[0] == [("a", 0, 4, True), ("b", 0, 4, True)]
    assert advance(s)[0] == [("a", 4, 1, True)]
    assert [request.id for request in s.waiting] == ["b"] and s.waiting[0].tokens == [
        0,
        1,
        2,
        3,
        100,
    ]
    assert advance(s) == ([("a", 5, 1, True)], ["a"])
    assert advance(s)[0] == [("b", 0, 5, True)]


def test_who_gives_way_is_admitted_before_who_came_later():
    s = scheduler(num_blocks=4, block_size=2, max_model_len=8)
    for name in "ab":
        s.add(request(name, 4, max_tokens=2))
    advance(s)
    s.add(request("c", 1))
    assert advance(s) == ([("a", 4, 1, True)], ["a"])
    assert [name for name, *_ in advance(s)[0]] == ["b", "c"]


def test_a_prompt_waits_until_all_of_it_has_blocks():
    s = scheduler(num_blocks=4, block_size=2, max_num_batched_tokens=4, max_model_len=8)
    s.add(request("a", 3, max_tokens=2))
    s.add(request("b", 5))
    assert advance(s)[0] == [("a", 0, 3, True)]
    assert advance(s) == ([("a", 3, 1, True)], ["a"])
    assert advance(s)[0] == [("b", 0, 4, False)]


def test_a_prompt_that_can_never_fit_is_refused():
    s = scheduler(num_blocks=3, block_size=4)
    s.add(request("a", 11))
    with pytest.raises(
        ValueError, match=r"request 'b': a prompt of 12 tokens does not fit, at most 11 do"
    ):
        s.add(request("b", 12))
    with pytest.raises(ValueError, match="at most 4 do"):
        scheduler(max_model_len=5).add(request("a", 5))


def test_an_id_in_use_is_refused():
    s = scheduler()
    s.add(request("a", 2))
    with pytest.raises(ValueError, match="request id 'a' is in use"):
        s.add(request("a", 2))


def test_an_empty_prompt_is_refused():
    with pytest.raises(ValueError, match="the prompt is empty"):
        Request("a", [])


def test_a_sequence_stops_at_the_longest_that_fits():
    s = scheduler(num_blocks=2, block_size=4)
    a = request("a", 6, max_tokens=50)
    s.add(a)
    advance(s)
    assert advance(s)[1] == ["a"]
    assert len(a.tokens) == 8 and a.finish_reason == "length"


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        ({}, "stop"),
        ({"ignore_eos": True}, None),
        ({"ignore_eos": True, "stop_token_ids": (2,)}, "stop"),
    ],
)
def test_stop_tokens_end_a_request_and_are_kept(params, reason):
    s = scheduler()
    a = Request("a", [5, 6], SamplingParams(**params), eos_ids=frozenset({2, 3}))
    s.add(a)
    advance(s, token=2)
    assert a.finish_reason == reason and a.new_tokens == [2]


def test_a_stop_token_in_the_prompt_ends_nothing():
    s = scheduler()
    a = Request("a", [2, 2], eos_ids=frozenset({2}))
    s.add(a)
    advance(s)
    assert a.finish_reason is None


def test_abort_frees_the_blocks_of_running_and_waiting_requests():
    s = scheduler(max_num_seqs=1)
    a, b = request("a", 5), request("b", 5)
    s.add(a)
    s.add(b)
    advance(s)
    assert s.abort("a") and s.abort("b") and not s.abort("a")
    s.check()
    assert a.finish_reason == b.finish_reason == "abort"
    assert s.next_step() is None and s.pool.num_free == 16


def test_a_request_aborted_while_its_step_runs_gets_no_token():
    s = scheduler()
    a, b = request("a", 3), request("b", 3)
    s.add(a)
    s.add(b)
    step = s.next_step()
    s.abort("a")
    s.finish_step(step, [[11], [12]])
    s.check()
    assert a.new_tokens == [] and b.new_tokens == [12]


def test_a_step_that_failed_is_decided_again():
    s = scheduler(max_num_batched_tokens=4)
    s.add(request("a", 3))
    s.add(request("b", 3))
    step = s.next_step()
    s.undo_step(step)
    s.check()
    assert s.next_step() == step


def test_a_step_that_failed_after_a_preemption_scores_no_prompt_token_twice():
    s = scheduler(max_num_batched_tokens=4, max_num_seqs=1, policy="priority")
    low, high = request("low", 10, prompt_logprobs=0), request("high", 3, max_tokens=1)
    low.priority = 1
    s.add(low)
    scored = list(s.next_step().chunks[0].scored)
    s.finish_step(s._in_flight[0].step, [()])
    s.add(high)
    advance(s)
    s.undo_step(s.next_step())  # computes the first tokens again
    while len(low.tokens) == 10:
        step = s.next_step()
        scored += step.chunks[0].scored
        s.finish_step(step, *step_results(step, 100))
    assert scored == low.tokens[1:10]


def test_a_preempted_request_draws_the_same_numbers():
    def numbers(num_blocks):
        s = scheduler(num_blocks=num_blocks, block_size=2, max_model_len=8)
        for name in "ab":
            s.add(request(name, 4, max_tokens=4, temperature=1.0, seed=3))
        seen, steps, slots = {}, 0, Slots(TokenCounts(torch.device("cpu"), 8))
        while (step := s.next_step()) is not None:
            for chunk, state in zip(step.chunks, slots.update(step), strict=True):
                for spec in state.specs(chunk.num_samples, chunk.end, chunk.draft):
                    seen[chunk.request_id, chunk.end] = float(uniform([spec.seed], [spec.index])[0])
            s.finish_step(step, *step_results(step, 100))
            steps += 1
        return seen, steps

    (wide, few), (tight, many) = numbers(16), numbers(4)
    assert wide == tight and few < many
    # Four for each request, and the same four for both, since they share a seed.
    assert len(wide) == 8 and len(set(wide.values())) == 4


def test_the_next_step_is_decided_before_the_tokens_of_the_last_are_known():
    s = scheduler()
    a = request("a", 3, max_tokens=3)
    s.add(a)
    first, second = s.next_step(), s.next_step()
    assert [chunk.tokens for chunk in first.chunks] == [(0, 1, 2)]
    assert second == ScheduledStep((), decoding=DecodeRows((0,), (3,)))
    s.check()
    assert finished(s.finish_step(first, [[7]])) == [] and a.tokens == [0, 1, 2, 7]
    third = s.next_step()
    assert third.decoding == DecodeRows((0,), (4,), ((0, ((1, (1,)),)),))  # with another block
    assert s.next_step() is None  # no token follows the third
    s.finish_step(second, [], [8])
    assert finished(s.finish_step(third, [], [9])) == ["a"] and a.new_tokens == [7, 8, 9]
    s.check()


@pytest.mark.parametrize(
    "params",
    [
        {"logprobs": 0},
        {"prompt_logprobs": 0},
        {"presence_penalty": 1.0},
        {"logit_bias": {1: 1.0}},
        {"min_tokens": 1},
        {"allowed_token_ids": (1,)},
        {"bad_words": ("a",)},
        {"structured": Structured(regex="a*")},
    ],
    ids=lambda params: next(iter(params)),
)
def test_a_token_in_flight_is_a_decode_row_whatever_the_request_asks_for(params):
    s = scheduler(max_num_batched_tokens=7)
    for name, prompt, more in (("plain", 3, {}), ("other", 3, params), ("late", 9, {})):
        s.add(request(name, prompt, **more))
    first = s.next_step()
    step = s.next_step()
    assert step.decoding == DecodeRows((0, 1), (3, 3))
    assert shares(step.chunks) == [("late", 1, 5, False)]
    assert (step.num_tokens, step.num_samples, step.num_output_rows) == (7, 2, 2)
    assert step.padded_size == (7, 3, 2, 5, False) and step.sampled_slots == [0, 1]
    s.finish_step(first, *step_results(first, 8))
    assert finished(s.finish_step(step, *step_results(step, 9))) == []
    assert s.requests["other"].new_tokens == [8, 9]
    s.check()


def test_a_token_drawn_after_the_last_one_is_dropped():
    s = scheduler()
    a = Request("a", [5, 6], SamplingParams(max_tokens=9), eos_ids=frozenset({2}))
    s.add(a)
    first, second = s.next_step(), s.next_step()
    assert finished(s.finish_step(first, [[2]])) == ["a"]
    assert s.finish_step(second, [], [7]) == [] and a.new_tokens == [2]
    s.check()
    assert s.pool.num_free == 16


def test_no_row_follows_a_draft_in_flight():
    s = scheduler()
    s.add(a := request("a", 3, max_tokens=9))
    advance(s)
    a.draft = (4, 5)
    s.next_step()
    assert s.next_step() is None and a.computed == 6


def test_decode_rows_let_go_of_blocks_behind_a_window():
    s = Scheduler(
        BlockPool([16, 16], 4, [0, 6]), max_num_seqs=1, max_num_batched_tokens=16, max_model_len=40
    )
    s.add(request("a", 5, max_tokens=25))
    steps, held = [s.next_step()], []
    for computed in range(5, 29):
        steps.append(s.next_step())
        step = steps.pop(0)
        s.finish_step(step, *step_results(step, 100))
        blocks = computed // 4 + 1  # with that of the token in flight
        held.append(len(s.pool.table("a", 1)))
        assert held[-1] == blocks - first_read(computed, 6) // 4
    assert max(held) == 3


def test_a_row_of_a_request_that_was_preempted_meanwhile_shares_no_block():
    s = scheduler(max_num_seqs=1, policy="priority", shares=True)
    s.add(late := Request("late", [1, 2, 3], SamplingParams(max_tokens=8), priority=1))
    first, row = s.next_step(), s.next_step()
    s.finish_step(first, [[4]])
    s.add(request("urgent", 2, max_tokens=1))
    urgent = s.next_step()
    assert row.decoding.starts == (3,) and late in s.waiting
    s.finish_step(row, [], [5])  # the row filled a block, which is not its own any more
    s.check()
    assert late.tokens == [1, 2, 3, 4, 5] and not s.request_errors.failed
    s.finish_step(urgent, [[100]])
    assert advance(s)[0] == [("late", 0, 5, True)]


def test_a_draft_is_kept_as_far_as_it_is_right():
    s = scheduler()
    a = request("a", 3, max_tokens=9)
    s.add(a)
    advance(s, token=3)
    a.draft = (4, 5, 6)
    step = s.next_step()
    assert step.chunks[0].tokens == (3, 4, 5, 6) and (step.num_samples, step.chunks[0].draft) == (
        4,
        (4, 5, 6),
    )
    s.finish_step(step, [[4, 5, 9]])
    s.check()
    assert a.tokens == [0, 1, 2, 3, 4, 5, 9] and (a.computed, a.pending) == (6, 1)
    assert (s.counters.drafted, s.counters.accepted) == (3, 2)


def test_a_wrong_draft_of_a_request_that_was_preempted_meanwhile_takes_nothing_back():
    s = scheduler(max_num_seqs=1, policy="priority")
    late = request("late", 2, max_tokens=8)
    late.priority = 1
    s.add(late)
    advance(s)
    late.draft = (4, 5)
    with_draft = s.next_step()
    s.add(request("urgent", 2, max_tokens=1))
    step = s.next_step()
    assert [chunk.request_id for chunk in step.chunks] == ["urgent"] and late in s.waiting
    s.finish_step(with_draft, [[9]])
    s.check()
    assert late.computed == 0 and late.tokens == [0, 1, 100, 9]
    s.finish_step(step, [[100]])
    assert advance(s)[0] == [("late", 0, 4, True)]


def test_a_prefix_that_was_computed_is_not_computed_again():
    s = scheduler(shares=True)
    s.add(request("a", 10, max_tokens=1))
    assert advance(s) == ([("a", 0, 10, True)], ["a"])
    s.add(request("b", 10, max_tokens=1))
    assert advance(s)[0] == [("b", 8, 2, True)]
    s.add(Request("c", list(range(10)), SamplingParams(max_tokens=1), salt="other"))
    assert advance(s)[0] == [("c", 0, 10, True)]
    assert (s.counters.prefix_queries, s.counters.prefix_hits) == (30, 8)


def test_a_whole_cached_prompt_leaves_one_block_to_compute():
    s = scheduler(shares=True)
    for name in "ab":
        s.add(request(name, 8, max_tokens=1))
        step = advance(s)[0]
    assert step == [("b", 4, 4, True)]


def test_who_needs_what_another_is_computing_waits_for_it():
    s = scheduler(max_num_batched_tokens=6, shares=True)
    for name in "ab":
        s.add(request(name, 10, max_tokens=2))
    s.add(Request("c", [50], SamplingParams(max_tokens=9)))
    assert advance(s)[0] == [("a", 0, 6, False)]
    assert advance(s)[0] == [("a", 6, 4, True), ("c", 0, 1, True)]
    assert advance(s)[0] == [("a", 10, 1, True), ("c", 1, 1, True), ("b", 8, 2, True)]


def test_a_step_hashes_a_bounded_part_of_the_prompts_that_wait_for_a_prefix(monkeypatch):
    monkeypatch.setattr(module_of_scheduler, "MOST_HASHED", 30)
    s = scheduler(num_blocks=64, shares=True)
    for i in range(7):
        s.add(request(f"{i}", 12))

    hashed = []
    for _ in range(2):
        s.next_step()  # of the first, which the others wait for
        hashed.append([request.id for request in s.requests.values() if request.keys])
        s.check()
    assert hashed == [["0", "1", "2", "3"], ["0", "1", "2", "3", "4", "5", "6"]]


def test_a_queue_by_priority_without_any_to_preempt_hashes_no_prompt():
    s = scheduler(num_blocks=64, shares=True, policy="priority", max_num_batched_tokens=8)
    for i in range(4):
        s.add(request(f"{i}", 12))
    s.next_step()
    assert [bool(r.keys) for r in s.requests.values()] == [True, False, False, False]


def test_answers_to_one_prompt_share_its_blocks():
    s = scheduler(shares=True)
    for one in siblings(request("a", 9, max_tokens=2, n=3, seed=7)):
        s.add(one)
    assert [(r.id, r.seed) for r in s.requests.values()] == [("a/0", 7), ("a/1", 8), ("a/2", 9)]
    assert advance(s)[0] == [("a/0", 0, 9, True)]
    assert advance(s)[0] == [("a/0", 9, 1, True), ("a/1", 8, 1, True), ("a/2", 8, 1, True)]
    assert s.pool.table("a/1")[:2] == s.pool.table("a/2")[:2]


def test_blocks_behind_a_window_are_let_go():
    s = Scheduler(
        BlockPool([8, 5], 4, [0, 4]), max_num_seqs=1, max_num_batched_tokens=4, max_model_len=32
    )
    s.add(request("a", 20, max_tokens=4))
    while s.requests:
        advance(s)
        if s.running:
            assert len(s.pool.table("a", 1)) <= 3
    assert s.pool.num_free == 13


def test_the_urgent_come_first_and_others_give_way():
    s = scheduler(num_blocks=4, max_num_seqs=2, max_model_len=16, policy="priority")
    for name, priority in (("a", 5), ("b", 5), ("c", 1)):
        s.add(Request(name, [ord(name)] * 6, SamplingParams(max_tokens=3), priority=priority))
    assert advance(s)[0] == [("c", 0, 6, True), ("a", 0, 6, True)]
    s.add(Request("d", [9] * 6, SamplingParams(max_tokens=3), priority=0))
    assert advance(s)[0] == [("c", 6, 1, True), ("d", 0, 6, True)]
    assert [r.id for r in s.waiting] == ["a", "b"] and s.counters.preemptions == 1


def test_a_full_queue_says_when_to_try_again():
    s = scheduler(max_queue=1)
    s.add(request("a", 2))
    with pytest.raises(QueueFull, match="1 requests wait already") as error:
        s.add(request("b", 2))
    assert error.value.retry_after > 0
    s.check()


V = 7
PREFIXES = [tuple(random.Random(i).choices(range(V), k=14)) for i in range(3)]


def history(before, token):
    """What a cache holds of a token: it depends on all tokens before."""
    return hash((before, token))


def alone(prompt, salt, max_tokens, max_len):
    """The tokens that a request gets if it has the device for itself."""
    state, tokens = hash(salt), list(prompt)
    for token in prompt:
        state = history(state, token)
    while True:
        tokens.append(state % V)
        state = history(state, tokens[-1])
        if tokens[-1] == EOS or len(tokens) == min(len(prompt) + max_tokens, max_len):
            return tokens


EOS = 0


def decided(s, prompt_limit):
    """What the next step computes, by one rule for all tokens: those that are pending. Changes the
    scheduler, a copy.
    """
    budget = s.max_num_batched_tokens
    prompts, computed = prompt_limit or budget, []

    def most(r):
        is_stream = r.pending <= (chunks.MOST_OF_STREAM if r.num_new else 1)
        return budget if is_stream else max(min(budget, prompts), 0)

    def compute(r, count):
        nonlocal budget, prompts
        if count < r.pending + len(r.draft):
            r.draft = r.draft[: max(count - r.pending, 0)]
        samples = r.computed + count == r.length + len(r.draft)
        computed.append((r.id, r.computed, count, samples))
        budget -= count
        prompts -= count if count > samples * (1 + len(r.draft)) else 0
        r.computed += count
        r.num_in_flight += samples

    if s.queues.by_priority:
        s._preempt_for_waiting(False)
    num_preempted = s.counters.preemptions
    for r in list(s.running):
        if not budget or r.slot is None:
            break
        is_over = r.num_in_flight and (r.draft or not r.room)
        count = 0 if is_over else min(r.pending + len(r.draft), most(r))
        if count and s._reserve(r, r.computed + count):
            compute(r, count)
    for r in list(s.waiting) if s.counters.preemptions == num_preempted else ():
        if not budget or prompts <= 0 or not s.queues.has_slot:
            break
        if r.num_in_flight or s.prefixes.must_wait(r):
            continue
        limit = most(r)  # before a cached prefix makes a short stream of it
        if not s._admit(r, limit):
            break
        compute(r, min(r.pending, limit))
    return computed


def outputs_of(s, tokens):
    """The outputs of the next step to finish, whose decode rows end as chunks of one token do.
    tokens: by request. Changes the scheduler, a copy.
    """
    outputs = []
    in_flight = s._in_flight.popleft()
    rows = [
        (r, r.num_admissions, Chunk(r.id, 0, (0,), start, (), num_samples=1))
        for r, start in zip(in_flight.rows, in_flight.step.decoding.starts, strict=True)
    ]
    for r, admission, chunk in [*in_flight.entries, *rows]:
        if r.finish_reason is not None:
            continue
        new = tokens[r.id] if chunk.num_samples else ()
        added = s.chunks.finish(r, chunk, admission, new)
        if r.finish_reason is not None:
            s._remove(r)
        if added is not None:
            ended = dict(finish_reason=r.finish_reason, stop_reason=r.stop_reason)
            queued = dict(num_cached=r.num_cached, queue_seconds=r.queue_seconds)
            outputs.append(Output(r.id, added, **ended, **queued))
    return outputs


def state_of(s):
    """What may depend on whether a token was a decode row."""

    def tables(r):
        return [s.pool.table(r.id, g) for g in range(len(s.pool.groups))]

    return [
        [
            (r.id, r.tokens, r.draft, r.computed, r.num_in_flight, r.slot, r.keys, tables(r))
            for r in queue
        ]
        for queue in (s.running, s.waiting)
    ] + [list(group.free) for group in s.pool.groups]


class Machine(RuleBasedStateMachine):
    """A scheduler, and a device whose cache holds histories: what it draws shows whether it read
    the right ones. `decided` and `outputs_of` must give the same as the scheduler.
    """

    @initialize(
        num_blocks=st.integers(8, 16),
        block_size=st.sampled_from([2, 3, 4]),
        max_num_seqs=st.integers(1, 4),
        budget=st.integers(1, 20),
        window=st.sampled_from([0, 3, 6]),
        shares=st.booleans(),
        policy=st.sampled_from(["fcfs", "priority"]),
    )
    def start(self, num_blocks, block_size, max_num_seqs, budget, window, shares, policy):
        windows = [0, window] if window else [0]
        self.s = Scheduler(
            BlockPool(num_blocks, block_size, windows, shares=shares),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=28,
            policy=policy,
            max_queue=12,
        )
        self.pool = self.s.pool
        self.caches = [{} for _ in windows]
        self.tables = [{} for _ in windows]
        self.last = {}
        self.flights = []
        self.all = []

    @rule(
        prefix=st.sampled_from(PREFIXES),
        cut=st.integers(0, 14),
        rest=st.lists(st.integers(0, V - 1), max_size=4),
        max_tokens=st.integers(1, 9),
        salt=st.sampled_from([None, None, "x"]),
        priority=st.integers(0, 2),
    )
    def add(self, prefix, cut, rest, max_tokens, salt, priority):
        prompt = [*prefix[:cut], *rest] or [1]
        params = SamplingParams(max_tokens=max_tokens)
        r = Request(
            f"r{len(self.all)}", prompt, params, frozenset({EOS}), priority=priority, salt=salt
        )
        if len(prompt) < self.s.max_len and len(self.s.waiting) < self.s.max_queue:
            self.s.add(r)
            self.all.append(r)

    @rule(which=st.integers(0, 40))
    def abort(self, which):
        if self.all:
            self.s.abort(self.all[which % len(self.all)].id)

    @rule(which=st.integers(0, 40), right=st.integers(0, 3), wrong=st.integers(0, 2))
    def draft(self, which, right, wrong):
        running = [r for r in self.s.running if r.pending == 1 and not r.num_in_flight]
        if not running:
            return
        r = running[which % len(running)]
        true = alone(r.tokens[: r.num_prompt], r.salt, 99, 99)[len(r.tokens) :]
        guess = [*true[:right], *[(token + 1) % V for token in true[right : right + wrong]]]
        r.draft = tuple(guess[: max(r.room - 1, 0)])

    @precondition(lambda self: len(self.flights) < 2)
    @rule(prompt_limit=st.none() | st.integers(1, 20))
    def launch(self, prompt_limit=None):
        step = self.next_step(prompt_limit)
        if step is not None and prompt_limit is not None:
            assert self.num_limited(step) <= prompt_limit
        if step is not None:
            self.flights.append((self.device(self.rows_as_chunks(step)), step))

    @precondition(lambda self: self.flights)
    @rule()
    def collect(self):
        tokens, step = self.flights.pop(0)
        expected, requests = deepcopy(self.s), self.s.step_requests(0)
        of_chunks = [tokens.get(chunk.request_id, ()) for chunk in step.chunks]
        of_rows = [tokens[r.id][0] for r, chunk in requests if chunk is None]
        assert self.s.finish_step(step, of_chunks, of_rows) == outputs_of(expected, tokens)
        assert state_of(self.s) == state_of(expected)

    @rule(count=st.integers(1, 8))
    def go_on(self, count):
        for _ in range(count):
            self.collect_all()
            self.launch()

    @precondition(lambda self: len(self.flights) == 1)
    @rule()
    def fail(self):
        """A step that is decided and cannot be run."""
        step = self.next_step()
        if step is not None:
            self.s.undo_step(step)

    def num_limited(self, step):
        """Tokens of a step that only prompts have."""
        return sum(
            chunk.num_prompt_tokens
            for chunk, r in zip(step.chunks, self.requests(step.chunks), strict=True)
            if not r.num_new
            or r.length - (chunk.num_samples > 0) - chunk.start > chunks.MOST_OF_STREAM
        )

    def next_step(self, prompt_limit=None):
        """The next step, which computes what is expected, in the same order."""
        expected = deepcopy(self.s)
        step = self.s.next_step(prompt_limit)
        computed = decided(expected, prompt_limit)
        assert state_of(self.s) == state_of(expected)
        rows = set() if step is None else {r.id for r in self.s._in_flight[-1].rows}
        computed.sort(key=lambda share: share[0] in rows)  # chunks come before them
        assert computed == (shares(self.rows_as_chunks(step)) if step else [])
        return step

    def rows_as_chunks(self, step):
        """The chunks of a step, then its decode rows, with the tokens that the device has."""
        blocks = dict(step.decoding.blocks)
        requests = [r for r, chunk in self.s.step_requests(-1) if chunk is None]
        rows = zip(requests, step.decoding.slots, step.decoding.starts, strict=True)
        return [
            *step.chunks,
            *[
                Chunk(r.id, slot, (self.last.get(slot),), start, blocks.get(slot, ()), 1, 1)
                for r, slot, start in rows
            ],
        ]

    def collect_all(self):
        while self.flights:
            self.collect()

    def device(self, chunks):
        """What is sampled, by request."""
        assert 0 < sum(chunk.num_tokens for chunk in chunks) <= self.s.max_num_batched_tokens
        drawn, now = {}, []
        for chunk, r in zip(chunks, self.requests(chunks), strict=True):
            for g, (start, blocks) in enumerate(chunk.blocks):
                table = self.tables[g].setdefault(chunk.slot, {})
                table.update(enumerate(blocks, start))
            state = (
                hash(r.salt)
                if chunk.start == 0
                else self.caches[0][self.place(0, chunk, chunk.start - 1)]
            )
            after = []
            for position, token in enumerate(chunk.tokens, chunk.start):
                state = history(state, token)
                for g in range(len(self.caches)):
                    self.caches[g][self.place(g, chunk, position)] = state
                after.append(state)
            now.append((chunk, r, after))
        for chunk, r, after in now:
            truth, states = hash(r.salt), []
            for token in [*r.tokens[: chunk.start], *chunk.tokens]:
                truth = history(truth, token)
                states.append(truth)
            for g, group in enumerate(self.pool.groups):
                for position in range(first_read(chunk.start, group.window), chunk.end):
                    assert self.caches[g][self.place(g, chunk, position)] == states[position], (
                        "read what is another's"
                    )
            if chunk.num_samples:
                new = []
                for i, state in enumerate(after[-chunk.num_samples :]):
                    new.append(state % V)
                    if i < len(chunk.draft) and chunk.draft[i] != new[-1]:
                        break
                drawn[r.id] = new
                self.last[chunk.slot] = new[-1]
        return drawn

    def requests(self, chunks):
        return [next(r for r in self.all if r.id == chunk.request_id) for chunk in chunks]

    def place(self, g, chunk, position):
        block, offset = divmod(position, self.pool.block_size)
        return self.tables[g][chunk.slot][block] * self.pool.block_size + offset

    @invariant()
    def holds(self):
        if hasattr(self, "s"):
            self.s.check()
            counters, new = self.s.counters, [r for r in self.all if r.num_new]
            assert counters.generated_tokens == sum(r.num_new for r in new)
            assert counters.prompt_tokens == sum(r.num_prompt for r in new)

    def teardown(self):
        if not hasattr(self, "s"):
            return
        for _ in range(2000):
            self.collect_all()
            self.launch(prompt_limit=1)
            self.s.check()
            if not self.s.requests:
                break
        assert (
            not self.s.requests
            and not self.pool.owners
            and self.pool.num_free == self.pool.num_blocks
        )
        for r in self.all:
            expected = alone(r.tokens[: r.num_prompt], r.salt, r.params.max_tokens, self.s.max_len)
            assert r.tokens == (
                expected[: len(r.tokens)] if r.finish_reason == "abort" else expected
            )


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_a_reset_forgets_cached_blocks_and_running_requests_share_no_more():
    s = scheduler(shares=True)
    s.add(request("a", 9, max_tokens=20))
    advance(s)
    s.add(request("b", 9, max_tokens=1))
    assert advance(s)[0] == [("a", 9, 1, True), ("b", 8, 1, True)]
    s.reset_prefix_cache()
    assert advance(s)[0] == [("a", 10, 1, True)]
    s.add(request("c", 9, max_tokens=1))
    assert advance(s)[0] == [("a", 11, 1, True), ("c", 0, 9, True)]
    # The blocks of "c" are cached; those that "a" fills behind them are not.
    tokens = [*range(9), *[100] * 8]
    s.add(Request("d", tokens, SamplingParams(max_tokens=1)))
    for _ in range(8):
        advance(s)
    s.add(Request("e", tokens[:13], SamplingParams(max_tokens=1)))
    assert advance(s)[0][1] == ("e", 12, 1, True)
    assert s.counters.prefix_hits == 8 + 8 + 12
