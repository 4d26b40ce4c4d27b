"""What the scheduler decides, as values, and what holds under random arrivals, lengths and aborts."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atomc.runtime.blocks import BlockPool
from atomc.runtime.draw import Draw
from atomc.runtime.request import Request
from atomc.runtime.sampling_params import SamplingParams
from atomc.runtime.scheduler import Chunk, ScheduledStep, Scheduler


def scheduler(num_blocks=16, block_size=4, max_num_seqs=8, max_num_batched_tokens=64, max_model_len=64):
    return Scheduler(
        BlockPool(num_blocks, block_size),
        max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens, max_model_len=max_model_len,
    )  # fmt: skip


def request(name, num_prompt, **params):
    return Request(name, list(range(num_prompt)), SamplingParams(**params))


def shares(step):
    """What each request computes: (id, start, number of tokens, whether a token is drawn)."""
    return [(chunk.request_id, chunk.start, len(chunk.tokens), chunk.draw is not None) for chunk in step.chunks]


def advance(s, token=100):
    """One step in which every draw gives `token`; what it computed, and who finished."""
    step = s.next_step()
    finished = s.finish_step(step, [token] * len(step.draws))
    s.check()
    return shares(step), [request.id for request in finished]


def test_nothing_to_do_is_no_step():
    assert scheduler().next_step() is None


def test_a_step_is_a_value_that_carries_all_it_needs():
    s = scheduler()
    random = SamplingParams(temperature=0.5, top_k=3, top_p=0.9, seed=1)
    s.add(Request("a", [7, 8, 9, 10, 11]))
    s.add(Request("b", [5], random))
    step = s.next_step()
    a, b = Draw("a", num_prompt=5), Draw("b", random, seed=1, num_prompt=1)
    assert step == ScheduledStep((Chunk("a", (7, 8, 9, 10, 11), 0, (0, 1), a), Chunk("b", (5,), 0, (2,), b)), block_size=4)
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
    assert [request.id for request in s.waiting] == ["b"] and s.waiting[0].tokens == [0, 1, 2, 3, 100]
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
    with pytest.raises(ValueError, match=r"request 'b': a prompt of 12 tokens does not fit, at most 11 do"):
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


@pytest.mark.parametrize("name", ["max_num_seqs", "max_num_batched_tokens", "max_model_len"])
def test_a_limit_below_one_is_refused(name):
    with pytest.raises(ValueError, match=f"{name} is 0"):
        scheduler(**{name: 0})


def test_a_sequence_stops_at_the_longest_that_fits():
    s = scheduler(num_blocks=2, block_size=4)
    a = request("a", 6, max_tokens=50)
    s.add(a)
    advance(s)
    assert advance(s)[1] == ["a"]
    assert len(a.tokens) == 8 and a.finish_reason == "length"


@pytest.mark.parametrize(
    ("params", "reason"),
    [({}, "stop"), ({"ignore_eos": True}, None), ({"ignore_eos": True, "stop_token_ids": (2,)}, "stop")],
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
    s.finish_step(step, [11, 12])
    s.check()
    assert a.new_tokens == [] and b.new_tokens == [12]


def test_a_step_that_failed_is_decided_again():
    s = scheduler()
    s.add(request("a", 3))
    assert s.next_step() == s.next_step()
    s.check()


def test_a_preempted_request_draws_the_same_numbers():
    def numbers(num_blocks):
        s = scheduler(num_blocks=num_blocks, block_size=2, max_model_len=8)
        for name in "ab":
            s.add(request(name, 4, max_tokens=4, temperature=1.0, seed=3))
        seen, steps = {}, 0
        while (step := s.next_step()) is not None:
            for chunk in step.chunks:
                if chunk.draw is not None:
                    seen[chunk.request_id, chunk.start + len(chunk.tokens)] = chunk.draw.uniform
            s.finish_step(step, [100] * len(step.draws))
            steps += 1
        return seen, steps

    (wide, few), (tight, many) = numbers(16), numbers(4)
    assert wide == tight and few < many
    # Four for each request, and the same four for both, since they share a seed.
    assert len(wide) == 8 and len(set(wide.values())) == 4


arrivals = st.lists(
    st.tuples(
        st.integers(0, 12),  # steps after the previous arrival
        st.integers(1, 23),  # prompt
        st.integers(1, 12),  # max_tokens
        st.one_of(st.none(), st.integers(0, 12)),  # aborted after so many steps
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=200, deadline=None)
@given(
    arrivals=arrivals,
    num_blocks=st.integers(6, 14),
    block_size=st.sampled_from([4, 5, 24]),
    max_num_seqs=st.integers(1, 6),
    max_num_batched_tokens=st.integers(1, 40),
)
def test_every_request_ends_and_each_token_is_computed_at_its_place(
    arrivals, num_blocks, block_size, max_num_seqs, max_num_batched_tokens
):
    """The token after position p is p + 1, so that a wrong place shows; the cache is a dict of slots."""
    s = scheduler(num_blocks, block_size, max_num_seqs, max_num_batched_tokens, max_model_len=24)
    requests, at, aborts = {}, 0, {}
    for i, (gap, num_prompt, max_tokens, abort_after) in enumerate(arrivals):
        at += gap
        requests[f"r{i}"] = at, request(f"r{i}", num_prompt, max_tokens=max_tokens)
        if abort_after is not None:
            aborts[f"r{i}"] = at + abort_after
    order = list(requests)
    cache: dict[int, tuple[str, int]] = {}
    for now in range(5000):
        for arrival, r in requests.values():
            if arrival == now:
                s.add(r)
        for name, moment in aborts.items():
            if moment == now:
                s.abort(name)
        s.check()
        step = s.next_step()
        s.check()
        if step is None:
            if now >= at:
                break
            continue
        assert 0 < step.num_tokens <= max_num_batched_tokens
        running, waiting = [r.id for r in s.running], [r.id for r in s.waiting]
        assert running + waiting == sorted(running + waiting, key=order.index), "out of the order of arrival"
        assert [chunk.request_id for chunk in step.chunks] == running[: len(step.chunks)]
        drawn = []
        for chunk in step.chunks:
            for position, token in enumerate(chunk.tokens, chunk.start):
                assert token == position
                block, offset = divmod(position, block_size)
                cache[chunk.blocks[block] * block_size + offset] = chunk.request_id, position
            end = chunk.start + len(chunk.tokens)
            for position in range(end):
                block, offset = divmod(position, block_size)
                assert cache[chunk.blocks[block] * block_size + offset] == (chunk.request_id, position)
            if chunk.draw is not None:
                drawn.append(end)
        for r in s.finish_step(step, drawn):
            assert r.finish_reason == "length" and r.tokens == list(range(len(r.tokens)))
            assert r.num_new == r.params.max_tokens or len(r.tokens) == s.max_len
        s.check()
    assert s.pool.num_free == num_blocks
    for name, (_, r) in requests.items():
        assert r.finish_reason == "length" or (r.finish_reason == "abort" and name in aborts)
