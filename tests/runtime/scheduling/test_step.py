"""A scheduled step is plain data, and small; a worker's state of a slot follows from the steps
alone.
"""

import random

import pytest
import torch
from step_results import step_results

from atomc.runtime.execution.slots import Slots
from atomc.runtime.requests.request import Request
from atomc.runtime.requests.sampling_params import SamplingParams
from atomc.runtime.sampling.token_counts import TokenCounts
from atomc.runtime.scheduling.blocks import BlockPool
from atomc.runtime.scheduling.scheduler import Scheduler
from atomc.runtime.scheduling.step import Admission, Chunk, DecodeRows, ScheduledStep

msgspec = pytest.importorskip("msgspec")
encode = msgspec.msgpack.encode
decode = msgspec.msgpack.Decoder(ScheduledStep).decode
PLAIN = (int, float, str, bool, type(None))
PENALIZED = SamplingParams(max_tokens=9, frequency_penalty=0.5, logit_bias={3: 1.0})
KINDS = [
    SamplingParams(max_tokens=9),
    PENALIZED,
    SamplingParams(max_tokens=3, prompt_logprobs=2),
    SamplingParams(max_tokens=5, temperature=0.5, seed=-1, stop_token_ids=(7,), min_tokens=2),
]


def scheduler(num_blocks=16, block_size=4, max_num_seqs=4, max_num_batched_tokens=12, shares=True):
    return Scheduler(
        BlockPool(num_blocks, block_size, shares=shares),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=600,
    )


def slots():
    return Slots(TokenCounts(torch.device("cpu"), 4))


def steps(s, requests, drafts=True):
    """All steps of these requests and of those in them, each before its tokens are known; some have
    drafts.
    """
    rng, waiting = random.Random(0), list(requests)
    while waiting or s.requests:
        if waiting:
            s.add(waiting.pop(0))
        for request in s.running:
            if drafts and request.pending == 1 and request.num_new and request.room > 2:
                request.draft = (rng.randrange(9),) * rng.randrange(3)
        step = s.next_step()
        yield step
        s.finish_step(step, *step_results(step, rng.randrange(9)))
        s.check()


def mix(count=8):
    rng = random.Random(1)
    return [
        Request(
            str(i),
            [5, 6, 7, 8] * rng.randint(0, 3) + rng.choices(range(9), k=rng.randint(1, 20)),
            KINDS[i % len(KINDS)],
            frozenset({60}),
            seed=2**64 + i,
        )
        for i in range(count)
    ]


def parts(value):
    """What a value consists of, down to what cannot change."""
    if isinstance(value, tuple | frozenset):
        for each in value:
            yield from parts(each)
    else:
        yield value


def test_a_step_is_the_same_after_a_journey():
    s = scheduler()
    found = [step for step in steps(s, mix())]
    assert (
        s.counters.preemptions
        and s.counters.accepted < s.counters.drafted
        and s.counters.prefix_hits
    )
    assert any(step.released for step in found) and any(
        chunk.scored for step in found for chunk in step.chunks
    )
    for step in found:
        assert decode(encode(step)) == step


def test_nothing_that_happens_to_requests_changes_a_step():
    s = scheduler()
    before = []
    for step in steps(s, mix()):
        before.append((step, encode(step)))
        # SamplingParams cannot be changed, and have copies of what they were made of.
        assert {type(part) for part in parts(step)} <= {*PLAIN, SamplingParams}
    for request in mix():
        s.add(request)
    step = s.next_step()
    before.append((step, encode(step)))
    for request in s.running:
        request.tokens[:] = [99] * 50
        request.draft, request.eos_ids, request.seed = (1, 2), frozenset({9}), 5
        request.params, request.num_prompt, request.keys = SamplingParams(), 1, []
        s.pool._tables[request.id][0].blocks[:] = [0]
    assert all(encode(step) == data for step, data in before)


def test_params_do_not_change_with_the_mapping_that_they_were_made_of():
    bias = {3: 1.0}
    params = SamplingParams(logit_bias=bias)
    bias[4] = 2.0
    assert params.logit_bias == {3: 1.0}


@pytest.mark.parametrize(
    "params",
    [SamplingParams(max_tokens=200), SamplingParams(max_tokens=200, frequency_penalty=0.5)],
)
def test_a_decode_step_does_not_hold_the_tokens_before(params):
    s = scheduler(num_blocks=200, max_num_batched_tokens=400)
    requests = [Request(str(i), list(range(300 + i, 390 + i)), params) for i in range(4)]
    sizes = [
        len(encode(step))
        for step in steps(s, requests, drafts=False)
        if all(c.num_tokens == 1 for c in step.chunks)
    ]
    assert len(sizes) > 150 and max(sizes) < 4 * 40


def test_a_step_names_what_a_request_needs_only_when_it_gets_a_slot():
    s = scheduler(num_blocks=4, block_size=2, shares=False)
    for name in "ab":
        s.add(Request(name, [1, 2, 3, 4], PENALIZED))
    admissions = []
    while s.requests and len(admissions) < 20:
        step = s.next_step()
        admissions.append(
            [
                (chunk.request_id, chunk.start)
                for chunk in step.chunks
                if chunk.admission is not None
            ]
        )
        s.finish_step(step, *step_results(step, 9))
    assert admissions[0] == [("a", 0), ("b", 0)] and s.counters.preemptions
    assert [one for each in admissions[1:] for one in each] == [("b", 0)] * s.counters.preemptions


def test_a_step_that_could_not_be_run_is_told_again_and_others_are_not():
    s = scheduler()
    s.add(Request("a", [1, 2, 3], PENALIZED))
    first = s.next_step()
    s.add(Request("b", [4, 5], PENALIZED))
    second = s.next_step()
    s.undo_step(second)
    again = s.next_step()
    assert again == second and again.chunks[0].admission is not None
    assert again.decoding == DecodeRows((0,), (3,))
    s.finish_step(first, [[7]])
    worker = slots()
    for step in (first, second, again):
        states = worker.update(step)
    assert [state.counts.tokens for state in states] == [[4, 5], [1, 2, 3]]  # rows come last


def test_a_worker_has_the_tokens_of_penalties_whatever_the_cache_had_of_them():
    s, worker = scheduler(), slots()
    prompt = list(range(10, 40))
    for name in "ab":
        s.add(Request(name, prompt, SamplingParams(max_tokens=2, presence_penalty=0.5)))
    seen = {}
    while s.requests:
        step = s.next_step()
        for chunk, state in zip(step.chunks, worker.update(step), strict=True):
            if chunk.num_samples:
                seen.setdefault(chunk.request_id, list(state.counts.tokens))
        s.finish_step(step, *step_results(step, 5))
    assert s.counters.prefix_hits == 28 and seen == {"a": prompt, "b": prompt}


def test_a_worker_drops_the_state_of_a_slot_when_it_is_told_that_the_request_left():
    s, worker = scheduler(), slots()
    for name in "ab":
        s.add(Request(name, [1, 2, 3], PENALIZED))
    step = s.next_step()
    a, b = worker.update(step)
    a.counts.row, b.counts.row = 2, 3
    s.finish_step(step, [[5], [5]])
    s.abort("a")
    step = s.next_step()
    s.undo_step(step)
    again = s.next_step()
    assert step.released == again.released == (0,)  # a step that could not be run told nobody
    worker.update(again)
    assert list(worker.states.values()) == [b] and worker.counts.free == [2]
    # The next one in the slot begins anew.
    s.add(Request("c", [9], SamplingParams()))
    step = s.next_step()
    assert step.released == ()
    c, _ = worker.update(step)
    assert c.request_id == "c" and c.counts is None and set(worker.states) == {0, 1}


def test_a_worker_notices_a_step_of_another_request_than_the_slot_has():
    worker = slots()
    chunk = Chunk(
        "a", 0, (5,), 0, ((0, (0,)),), admission=Admission(SamplingParams(), 0, 1, frozenset())
    )
    worker.update(ScheduledStep((chunk,)))
    with pytest.raises(AssertionError, match="slot 0 belongs to a, not b"):
        worker.update(ScheduledStep((Chunk("b", 0, (6,), 1, ((0, ()),)),)))
