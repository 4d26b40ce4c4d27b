"""State per sequence that requests share by snapshots, and that drafts go back to: greedy tokens are
those of the plain model on each whole sequence.
"""

import random

import pytest
import torch
from embeddings import embed
from state_toy import (
    VOCAB,
    WIDTH,
    Failed,
    Summed,
    alone,
    made,
    prompts_of,
    requests_of,
    run,
    started,
    toy,
)
from tiny_mtp import tiny_model
from torch import nn

from atomc.ops.state import StateSpec
from atomc.planning.device_model import Model
from atomc.planning.plan_report import Workload
from atomc.planning.step_plan import plan_step
from atomc.platform import Platform
from atomc.runtime.engine import EngineConfig
from atomc.runtime.execution.capacity import Capacity, capacity
from atomc.runtime.execution.graphs import StepGraphs, step_shapes
from atomc.runtime.execution.sequence_states import SequenceStates
from atomc.runtime.requests.request import Request, siblings
from atomc.runtime.requests.sampling_params import SamplingParams
from atomc.runtime.scheduling.blocks import BlockPool
from atomc.runtime.scheduling.scheduler import Scheduler
from atomc.runtime.scheduling.snapshots import Snapshots
from atomc.runtime.scheduling.state_rows import StateRows
from atomc.runtime.scheduling.step import Chunk, ScheduledStep

__all__ = ["made"]  # a fixture

pytestmark = [pytest.mark.xdist_group("runtime"), pytest.mark.usefixtures("compiled_once")]

BLOCK, COUNT = 16, 8


def sharing(kind, module=None, **config):
    """An engine that takes snapshots at each opportunity: those of few tokens, too."""
    given = {"state_snapshots": 4, "max_num_batched_tokens": 65}
    engine = started(kind, module, **{**given, **config})
    if engine.scheduler.snapshots is not None:
        engine.scheduler.snapshots.least = engine.scheduler.snapshots.interval = BLOCK
    return engine


SLOW = pytest.mark.slow


@pytest.fixture(
    scope="module",
    params=["lasting", "lasting mixed", pytest.param("lasting windowed", marks=SLOW)],
)
def served(request):
    """Few blocks and rows: requests are preempted, and snapshots evicted."""
    return request.param, sharing(request.param, scheduling_policy="priority", num_blocks=11)


@pytest.fixture(
    scope="module",
    params=[
        "lasting mixed",
        *(pytest.param(x, marks=SLOW) for x in ("lasting", "lasting windowed")),
    ],
)
def drafting(request):
    return request.param, sharing(
        request.param,
        scheduling_policy="priority",
        num_blocks=8,
        speculative_tokens=3,
        ngram_min=1,
    )


# ---- equality under random mixes


def mix(engine, kind, seed, *, repetitive=False):
    """Requests with common prefixes that arrive and are aborted at random, in steps of random sizes.
    Each result is a prefix of what the request gives alone.
    """
    rng = random.Random(seed)
    engine.scheduler.max_num_batched_tokens = rng.choice([1, 3, rng.randint(4, 65), 65])
    vocabulary = rng.sample(range(VOCAB), 4) if repetitive else range(VOCAB)
    bases = [[rng.choice(vocabulary) for _ in range(rng.randint(16, 70))] for _ in range(2)]
    requests = []
    for i in range(rng.randint(3, 7)):
        base, tail = rng.choice(bases), [rng.choice(vocabulary) for _ in range(rng.randint(0, 14))]
        prompt = (base if rng.random() < 0.7 else base[: rng.randint(1, len(base))]) + tail
        params = SamplingParams(max_tokens=COUNT, ignore_eos=True, n=rng.choice([1, 1, 2]))
        request = engine.request(f"{seed}.{i}", prompt, params, priority=rng.randint(0, 2))
        requests += siblings(request)
    expected = {request.id: alone(kind, request.tokens, COUNT) for request in requests}
    aborted = {request.id: rng.randint(0, 40) for request in requests if rng.random() < 0.2}
    found, step = {request.id: [] for request in requests}, 0
    waiting = requests.copy()
    while engine.has_work or waiting:
        while waiting and (rng.random() < 0.4 or not engine.has_work):
            engine.add(waiting.pop(0))
        for name, at in aborted.items():
            if at == step:
                engine.abort(name)
        for output in engine.step():
            assert output.error is None, output.error
            found[output.request_id] += output.token_ids
        engine.check()
        step += 1
        assert step < 3000, "the requests do not end"
    for name, tokens in found.items():
        assert tokens == expected[name][: len(tokens)], (seed, name)
        assert len(tokens) == COUNT or name in aborted, (seed, name)


MIXES = [range(8), pytest.param(range(8, 50), marks=SLOW)]


@pytest.mark.rotating
@pytest.mark.parametrize("seeds", MIXES, ids=["some", "many"])
def test_requests_that_start_from_snapshots_give_what_they_give_alone(served, seeds):
    kind, engine = served
    for seed in seeds:
        mix(engine, kind, seed)
    stats = engine.stats()
    assert stats.snapshot_hits > 3 and stats.prefix_hits and stats.preemptions
    assert stats.snapshots > stats.snapshots_total == 4


@pytest.mark.parametrize("seeds", MIXES, ids=["some", "many"])
def test_requests_whose_drafts_are_rejected_give_what_they_give_alone(drafting, seeds):
    kind, engine = drafting
    for seed in seeds:
        mix(engine, kind, seed, repetitive=True)
    stats = engine.stats()
    assert stats.snapshot_hits and stats.preemptions and stats.drafted > stats.accepted > 0


def test_sampled_tokens_do_not_depend_on_drafts_and_snapshots(drafting):
    kind, engine = drafting
    prompts = [[1, 2, 3] * 12, [1, 2, 3] * 12, [7, 8] * 9, *prompts_of(40, 3)]

    def tokens(engine, which):
        return run(
            engine,
            [
                engine.request(
                    str(i),
                    prompts[i],
                    SamplingParams(
                        max_tokens=20,
                        temperature=0.7,
                        seed=i % 3,
                        ignore_eos=True,
                        presence_penalty=0.5,
                    ),
                )
                for i in which
            ],
        )

    engine.scheduler.max_num_batched_tokens = 65
    before = engine.stats()
    together = tokens(engine, range(5))
    assert engine.stats().drafted > before.drafted and engine.stats().accepted > before.accepted
    without = started(kind, state_snapshots=0)
    assert [tokens(without, [i])[0] for i in range(5)] == together


class Remembering(nn.Module):
    """Attention of a layer, and a sum over what came before."""

    def __init__(self, attention):
        super().__init__()
        self.attention, self.sums = attention, Summed(decay=0.95)

    def forward(self, x, *angles):
        return self.attention(x, *angles) + self.sums(x)


@pytest.mark.rotating
def test_drafts_of_a_draft_layer_are_taken_out_of_states():
    def engine(**config):
        model = tiny_model()
        model.model.layers[0].self_attn = Remembering(model.model.layers[0].self_attn)
        return sharing("draft layer", model, max_model_len=200, **config)

    document, *tails = prompts_of(40, 3, 12, 7, seed=8)
    prompts = [[*document, *tail] for tail in tails]
    drafting = engine(speculative="mtp", speculative_tokens=2)
    without = engine(state_snapshots=0)
    assert run(drafting, requests_of(drafting, prompts, 40)) == [
        run(without, requests_of(without, [prompt], 40))[0] for prompt in prompts
    ]
    stats = drafting.stats()
    assert stats.drafted > stats.accepted > 0 and stats.snapshot_hits


def test_tokens_that_are_computed_again_are_bounded(drafting, monkeypatch):
    """Each draft is rejected after one token: without a bound, each would add two tokens."""
    kind, engine = drafting
    (prompt,) = prompts_of(10, seed=300)
    expected, count = alone(kind, prompt, 40), engine.config.speculative_tokens

    def propose(request):
        known = len(request.tokens) - len(prompt)
        return (expected[known], *[(x + 1) % VOCAB for x in expected[known + 1 : known + count]])

    monkeypatch.setattr(engine, "_propose_draft", propose)
    (request,) = requests_of(engine, [prompt], 30)
    engine.add(request)
    sizes = set()
    while engine.has_work:
        engine.step()
        sizes |= {chunk.num_tokens for x in engine.scheduler._in_flight for chunk in x.step.chunks}
    assert request.new_tokens == expected[:30]
    assert max(sizes - {len(prompt)}) == 1 + 2 * count - 1  # 3 pending tokens and the draft


# ---- what is shared


def test_a_longer_prompt_starts_at_the_last_full_block_of_a_shorter_one(served):
    kind, engine = served
    engine.scheduler.max_num_batched_tokens = 65
    (prefix,) = prompts_of(40, seed=100)
    run(engine, requests_of(engine, [prefix]))
    hits = engine.stats().snapshot_hits
    (longer,) = requests_of(engine, [[*prefix, 3, 4]])
    assert run(engine, [longer]) == [alone(kind, [*prefix, 3, 4], 8)]
    assert longer.num_cached == 32 and engine.stats().snapshot_hits == hits + 1
    # Another salt does not see it.
    (salted,) = requests_of(engine, [[*prefix, 3, 4]], salt="mine")
    assert run(engine, [salted]) == [alone(kind, [*prefix, 3, 4], 8)]
    assert salted.num_cached == 0


def test_answers_of_one_prompt_compute_it_once(served):
    kind, engine = served
    (prompt,) = prompts_of(50, seed=101)
    params = SamplingParams(max_tokens=8, ignore_eos=True, n=3)
    requests = siblings(engine.request("siblings", prompt, params))
    assert run(engine, requests) == [alone(kind, prompt, 8)] * 3
    assert [request.num_cached for request in requests] == [0, 48, 48]


def test_the_third_prompt_that_begins_alike_starts_where_the_first_two_part(served):
    kind, engine = served
    (document,) = prompts_of(44, seed=102)
    prompts = [[*document, *tail] for tail in prompts_of(30, 31, 20, seed=103)]
    cached = []
    for prompt in prompts:
        (request,) = requests_of(engine, [prompt])
        assert run(engine, [request]) == [alone(kind, prompt, 8)]
        cached.append(request.num_cached)
    assert cached == [0, 0, 32]


def test_the_next_turn_of_a_conversation_starts_in_the_answer_before():
    engine = sharing("lasting mixed")
    (prompt,) = prompts_of(20)
    (answer,) = run(engine, requests_of(engine, [prompt], 40))
    turn = [*prompt, *answer, 5, 6]
    (request,) = requests_of(engine, [turn])
    assert run(engine, [request]) == [alone("lasting mixed", turn, 8)]
    assert request.num_cached == 48  # of 60: tokens 17 to 48 were generated


def test_a_preempted_request_resumes_from_its_last_snapshot():
    engine = sharing("lasting", scheduling_policy="priority", max_num_seqs=1)
    (prompt, urgent) = prompts_of(20, 5)
    (request,) = requests_of(engine, [prompt], 40)
    engine.add(request)
    while request.computed < 50:
        engine.step()
    other = engine.request("urgent", urgent, SamplingParams(max_tokens=2), priority=-1)
    engine.add(other)
    engine.step()
    assert request.slot is None and engine.stats().preemptions == 1
    while request.slot is None:
        engine.step()
        engine.check()
    assert request.computed in (49, 50, 51, 52)  # from 48 on
    while engine.has_work:
        engine.step()
    assert request.new_tokens == alone("lasting", prompt, 40)


def test_an_aborted_request_keeps_no_row():
    engine = sharing("lasting", max_num_batched_tokens=16)
    for number, steps in enumerate(range(1, 8)):
        (request,) = requests_of(engine, [prompts_of(60, seed=number)[0]])
        engine.add(request)
        for _ in range(steps):
            engine.step()
        engine.abort("0")
        engine.step()
        engine.check()
        assert not engine.has_work
    held = engine.scheduler.snapshots
    assert not held._reserved and len(held._free) + held.num_cached == 4


def test_a_request_whose_logits_are_nan_leaves_no_snapshot(monkeypatch):
    engine = sharing("lasting mixed")
    (prompt,) = prompts_of(40)
    logits = engine.executor.runner.logits

    def broken(step, **given):
        return torch.full_like(logits(step, **given), torch.nan)

    with monkeypatch.context() as patch:
        patch.setattr(engine.executor.runner, "logits", broken)
        for request in requests_of(engine, [prompt]):
            engine.add(request)
        outputs = []
        while engine.has_work:
            outputs += engine.step()
    assert outputs[-1].error is not None and engine.stats().snapshots_held == 0
    (again,) = requests_of(engine, [prompt])
    assert run(engine, [again]) == [alone("lasting mixed", prompt, 8)] and again.num_cached == 0


def test_embeddings_start_from_snapshots_too():
    engine = sharing("lasting")
    prefix, *tails = prompts_of(40, 3, 5, seed=5)
    prompts = [[*prefix, *tail] for tail in tails]
    found = embed(engine, prompts, "last")
    assert engine.stats().snapshot_hits == 1
    embed(engine, prompts, "mean")  # which needs every row
    assert engine.stats().snapshot_hits == 1
    engine.scheduler.forget_counts()  # each request is now the other one
    other = embed(engine, prompts[::-1], "last")[::-1]
    assert engine.stats().snapshot_hits == 1
    torch.testing.assert_close(torch.tensor(other), torch.tensor(found), atol=1e-6, rtol=0)


# ---- steps that fail


def tokens_despite_failures(kind, engine, monkeypatch):
    """The tokens of requests of which a fifth of the steps fail, before or after the device ran
    them; and those of each request alone.
    """
    engine.scheduler.max_num_batched_tokens = 24
    rng, errors, launch = random.Random(0), [], engine.executor.launch

    def failing(step):
        fails, before = rng.random() < 0.2, rng.random() < 0.5
        launched = None if fails and before else launch(step)
        if fails:
            errors.append(Failed("launch"))
            raise errors[-1]
        return launched

    bases = prompts_of(40, 60, seed=200)
    prompts = [[*base, *tail] for base in bases for tail in prompts_of(2, 9, 17)]
    prompts.append([1, 2, 3] * 10)
    with monkeypatch.context() as patch:
        patch.setattr(engine.executor, "launch", failing)
        found = run(engine, requests_of(engine, prompts, 16), fails=errors)
    assert len(errors) > 4
    return found, [alone(kind, prompt, 16) for prompt in prompts]


def test_steps_that_fail_take_no_wrong_snapshots(served, monkeypatch):
    tokens, expected = tokens_despite_failures(*served, monkeypatch)
    assert tokens == expected


def test_steps_that_fail_leave_the_states_before_drafts(drafting, monkeypatch):
    tokens, expected = tokens_despite_failures(*drafting, monkeypatch)
    assert tokens == expected


# ---- decisions, as values


def scheduled(snapshots=2, drafts=False, max_num_batched_tokens=64, **config):
    """A scheduler of a model without blocks, and of snapshots of 4 tokens."""
    rows = StateRows(2, drafts, snapshots)
    held = Snapshots(rows.first_snapshot, snapshots, 4)
    vars(held).update({"least": 4, "interval": 8, **config})
    return Scheduler(
        BlockPool((), 4, (), shares=snapshots > 0),
        max_num_seqs=2,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=64,
        state_rows=rows,
        snapshots=held if snapshots else None,
    )


def advance(s, *tokens):
    """One step: (request, start, new tokens, state_from, state_kept, snapshot) of each chunk."""
    step = s.next_step()
    sampled, snapshots = iter(tokens), dict(step.snapshots)
    s.finish_step(step, [next(sampled, [9]) if x.num_samples else () for x in step.chunks])
    s.check()
    return [
        (x.request_id, x.start, x.num_tokens, x.state_from, x.state_kept, snapshots.get(x.slot))
        for x in step.chunks
    ]


def test_rows_of_states_follow_each_other():
    rows = StateRows(3, True, 4)
    assert [rows.row_before_draft(slot) for slot in range(3)] == [4, 5, 6]  # 3 is for padding
    assert (rows.first_snapshot, rows.total) == (7, 11)
    assert (StateRows(3).total, StateRows(3, snapshots=2).first_snapshot) == (4, 4)


def test_a_prompt_ends_a_chunk_at_its_last_full_block_and_siblings_start_there():
    s = scheduled()
    for request in siblings(Request("a", list(range(10)), SamplingParams(max_tokens=2, n=2))):
        s.add(request)
    assert advance(s) == [("a/0", 0, 8, None, None, 3)]
    # One token is left to compute.
    assert advance(s) == [("a/0", 8, 2, None, None, None), ("a/1", 8, 2, 3, None, None)]


def test_a_prompt_of_whole_blocks_leaves_a_block_to_compute():
    s = scheduled()
    s.add(Request("a", list(range(8)), SamplingParams(max_tokens=1)))
    assert advance(s) == [("a", 0, 4, None, None, 3)]
    # Its end is a block border as well, but too near for another.
    assert advance(s) == [("a", 4, 4, None, None, None)]


def test_a_snapshot_of_too_few_tokens_is_not_taken():
    s = scheduled(least=9)
    s.add(Request("a", list(range(10)), SamplingParams(max_tokens=1)))
    assert advance(s) == [("a", 0, 10, None, None, None)]


def test_a_request_keeps_one_snapshot_that_moves_along():
    s = scheduled(snapshots=3)
    s.add(Request("a", [1, 2], SamplingParams(max_tokens=40)))
    taken = [chunk[5] for _ in range(35) for chunk in advance(s)]
    assert [i for i, row in enumerate(taken) if row is not None] == [
        6,
        14,
        22,
        30,
    ]  # 8 tokens apart
    assert s.snapshots.num_cached == 1 and s.counters.snapshots == 4


def test_a_snapshot_that_another_request_used_stays():
    s = scheduled(snapshots=3)
    s.add(Request("a", [1, 2], SamplingParams(max_tokens=40)))
    for _ in range(10):
        advance(s)
    s.add(Request("b", [1, 2, *[9] * 8], SamplingParams(max_tokens=1)))
    assert ("b", 8, 2, 3, None, None) in advance(s)
    for _ in range(10):
        advance(s)
    assert s.snapshots.num_cached == 2


def test_a_reset_forgets_snapshots_and_running_requests_take_no_more():
    s = scheduled(snapshots=3)
    s.add(Request("a", [1, 2], SamplingParams(max_tokens=40)))
    for _ in range(10):
        advance(s)
    assert s.snapshots.num_cached == 1
    s.reset_prefix_cache()
    assert s.snapshots.num_cached == 0
    assert [chunk[5] for _ in range(20) for chunk in advance(s)] == [None] * 20
    s.add(Request("b", [1, 2, *[9] * 8], SamplingParams(max_tokens=1)))
    assert ("b", 0, 8, None, None, 3) in advance(s)


def test_the_least_recently_used_snapshot_is_evicted():
    s = scheduled(snapshots=2)
    prompts = {name: [i] * 6 for i, name in enumerate("abc")}

    def first(name):
        s.add(Request(name, prompts[name], SamplingParams(max_tokens=1)))
        chunk, *_ = advance(s)
        while s.requests:
            advance(s)
        return chunk[1]

    assert [first(name) for name in "ab"] == [0, 0]
    assert [first(name) for name in "ba"] == [4, 4]
    assert first("c") == 0  # in the place of b
    assert [first(name) for name in "acb"] == [4, 4, 0]


def test_a_snapshot_is_used_only_with_all_blocks_before_it():
    held = Snapshots(0, 2, 4)
    held.least = held.interval = 4
    request = Request("a", list(range(12)), keys=[b"4", b"8", b"12"])
    request.snapshot_points = (4, 12)
    for end in (4, 12):
        row = held.take(request, end)
        assert row is not None and held.finish(row, request, end, request.num_admissions)
    assert held.match(request.keys, len) == 3 and held.match(request.keys[:2], len) == 1
    assert held.match(request.keys, lambda keys: min(len(keys), 2)) == 1
    assert held.match(request.keys, lambda keys: 0) == 0


def test_a_rejected_draft_goes_back_to_the_state_before_it_and_its_tokens_are_computed_again():
    s = scheduled(snapshots=0, drafts=True)
    s.add(Request("a", [1, 2, 3], SamplingParams(max_tokens=20)))
    assert advance(s, [5]) == [("a", 0, 3, None, None, None)]
    request = s.running[0]
    request.draft = (6, 7, 8)
    # Row 3 keeps the state of slot 0; 6 is accepted, and 4 follows.
    assert advance(s, [6, 4]) == [("a", 3, 4, None, 3, None)]
    assert request.computed == 3 and request.tokens == [1, 2, 3, 5, 6, 4]
    request.draft = (7,)
    # 5, 6, 4 and the draft; the row has the state before them still.
    assert advance(s, [2]) == [("a", 3, 4, 3, None, None)]
    assert advance(s, [2]) == [("a", 3, 4, 3, None, None)]  # 5, 6, 4, 2: no draft
    request.draft = (7, 7)
    assert advance(s, [7, 7, 1]) == [("a", 7, 3, None, 3, None)]
    assert request.computed == 10 and request.pending == 1


def test_a_preempted_request_forgets_the_state_before_its_draft():
    s = scheduled(snapshots=0, drafts=True)
    s.add(Request("a", [1, 2, 3], SamplingParams(max_tokens=20)))
    advance(s, [5])
    (request,) = s.running
    request.draft = (6, 7)
    advance(s, [4])
    assert request.state_from == 3
    s._preempt(request)
    s.check()
    assert advance(s, [8]) == [("a", 0, 5, None, None, None)]


def test_a_snapshot_that_is_due_takes_the_place_of_a_draft():
    s = scheduled(snapshots=2, drafts=True)
    s.add(Request("a", [1, 2, 3, 4, 5, 6], SamplingParams(max_tokens=20)))
    assert advance(s) == [("a", 0, 4, None, None, 5)]
    advance(s)
    (request,) = s.running
    for draft, chunk in (
        ((7, 7), ("a", 6, 3, None, 3, None)),
        ((7, 7), ("a", 9, 3, None, 3, None)),  # at 12, of which the last two are a draft
    ):
        request.draft = draft
        assert advance(s, [7, 7, 7]) == [chunk]
    for start in range(12, 15):
        assert advance(s) == [("a", start, 1, None, None, None)]
    request.draft = (7, 7)
    assert advance(s) == [("a", 15, 1, None, None, 6)]
    request.draft = (7, 7)
    assert advance(s, [7, 7, 7]) == [("a", 16, 3, None, 3, None)]


def test_decode_rows_take_snapshots_too():
    s = scheduled(snapshots=1, interval=4)
    s.add(a := Request("a", [1, 2, 3], SamplingParams(max_tokens=20)))
    steps = [s.next_step(), s.next_step()]  # the second computes the fourth token
    assert steps[1].decoding.starts == (3,) and steps[1].snapshots == ((0, 3),)
    s.undo_step(steps.pop())
    s.check()
    assert a in s.waiting  # its state may be that of the step
    s.finish_step(steps.pop(), [[9]])
    steps = [s.next_step(), s.next_step()]
    assert [step.snapshots for step in steps] == [((0, 3),), ()]
    s.finish_step(steps.pop(0), [[9]])
    steps += [s.next_step() for _ in range(3)]  # the last one computes the eighth token
    assert steps[-1].snapshots == ((0, 3),) and s.snapshots.num_cached == 0  # the only row
    for step in steps:
        s.finish_step(step, [], [9])
        s.check()
    assert s.snapshots.num_cached == 1 and a.moving_snapshot == a.keys[1]


def test_a_request_that_fails_in_a_step_leaves_no_snapshot():
    s = scheduled()
    s.add(Request("a", list(range(10))))
    step = s.next_step()
    s.request_errors.fail("a", "testing it", RuntimeError("broken"))
    s.finish_step(step, [()])
    s.check()
    assert step.snapshots == ((0, 3),) and s.snapshots.num_cached == 0


def test_a_step_that_is_undone_leaves_its_rows_and_takes_its_snapshots_again():
    s = scheduled(snapshots=1)
    s.add(Request("a", [1, 2], SamplingParams(max_tokens=40)))
    s.add(Request("b", list(range(10)), SamplingParams(max_tokens=40)))
    step = s.next_step()
    s.undo_step(step)
    s.check()
    assert s.next_step() == step and step.snapshots == ((1, 3),)


def test_what_a_step_copies():
    def chunk(slot, **rows):
        return Chunk(str(slot), slot, (1,), 4, (), **rows)

    step = ScheduledStep(
        (
            chunk(0),
            chunk(1, state_from=9),
            chunk(2, state_kept=6),
            chunk(3, state_from=8, state_kept=7),
        )
    )
    assert step.copies_before == [(9, 1), (2, 6), (8, 3), (8, 7)]


# ---- tensors


def test_a_copy_moves_the_rows_of_all_layers():
    specs = [
        StateSpec.of("a", "recurrent", [(3,)], torch.float32),
        StateSpec.of("b", "kv", [(1, 3), (1, 3)], torch.float32),
        StateSpec.of("c", "conv", [(3, 5)], torch.bfloat16),
        StateSpec.of("d", "recurrent", [(3,)], torch.float32),
    ]
    states = SequenceStates(specs, StateRows(2, snapshots=4), "cpu")
    tensors = [tensor for i in (0, 2, 3) for tensor in states.of(i).values()]
    assert [list(tensor.shape) for tensor in tensors] == [[7, 3], [7, 3, 5], [7, 3]]
    for tensor in tensors:
        assert tensor.is_contiguous() and not tensor.any()
        assert not tensor.data_ptr() % 16
        tensor.copy_(torch.arange(7).view(7, *[1] * (tensor.dim() - 1)).expand_as(tensor))
    states.copy([(0, 4), (1, 5), (3, 2), (1, 6)])
    for tensor in tensors:
        assert tensor.flatten(1)[:, 0].tolist() == [0, 1, 3, 3, 0, 1, 1]


def test_steps_that_compute_rejected_tokens_again_have_graphs_of_their_own():
    shapes = step_shapes(4, 1000, 9, drafts=3, rewinds=True)
    assert {(4, 4), (16, 4), (28, 4), (7, 1)} <= {shape[:2] for shape in shapes}
    graphs = StepGraphs.__new__(StepGraphs)
    graphs.captured = dict.fromkeys(sorted(shapes))
    # Three sequences, one of which has 3 tokens again: not padded to 64 rows.
    assert graphs.shape_for(4 + 4 + 7, 3, 12, 7)[:2] == (28, 4)
    assert graphs.shape_for(12, 3, 12, 4)[:2] == (16, 4)


# ---- memory and settings


def test_rows_beside_the_slots_are_charged_before_blocks():
    given = {
        "groups": [(100, 0)],
        "block_size": 16,
        "max_num_seqs": 4,
        "longest": 1000,
        "available": 100_000,
        "bytes_per_sequence": 5_000,
    }
    assert capacity(**given) == Capacity((46,), 16, 736)
    assert capacity(**given, snapshots=2) == Capacity((40,), 16, 640, 2)
    assert capacity(**given, snapshots=2, rewinds=True) == Capacity((28,), 16, 448, 2)
    # An eighth of the 75,000 bytes that the slots leave, and at most max_num_seqs.
    assert capacity(**given, snapshots=None) == Capacity((43,), 16, 688, 1)
    assert capacity(**{**given, "bytes_per_sequence": 100}, snapshots=None).snapshots == 4
    assert capacity(**{**given, "available": 0, "num_blocks": 70}, snapshots=None).snapshots == 1
    expected = (
        r"the state of 4 sequences, twice because of drafts, and 90 snapshots takes 495000 bytes "
        r"\(5000 each\), and there is room for 100000: lower max_num_seqs or state_snapshots"
    )
    with pytest.raises(ValueError, match=expected):
        capacity(**given, snapshots=90, rewinds=True)
    assert capacity(**{**given, "bytes_per_sequence": 0}, snapshots=None).snapshots == 0


def test_a_plan_counts_snapshots():
    model, longest = Model(toy("lasting mixed", "meta"), {}, None, torch.float64, None, 0), 4096
    found = plan_step(
        model, Platform.named("h200"), Workload(), longest=longest, options={"layout": "paged"}
    )
    memory = found.memory
    of_one = longest * memory.per_token + memory.per_sequence
    assert memory.per_sequence == 2 * WIDTH * 8 and 0 < memory.snapshots <= memory.fits
    used = memory.fits * of_one + memory.snapshots * memory.per_sequence
    assert 0.99 < used / memory.cache <= 1
    assert f"snapshots of states {memory.snapshots}" in " ".join(found.to_text().split())


def test_snapshots_that_cannot_be_are_refused_with_the_reason():
    with pytest.raises(ValueError, match="state_snapshots is -1, it must be 0"):
        EngineConfig(state_snapshots=-1)
    with pytest.raises(ValueError, match="state_snapshots is 2, but enable_prefix_caching is off"):
        EngineConfig(state_snapshots=2, enable_prefix_caching=False)
    with pytest.raises(ValueError, match="state_snapshots is 2, but the model keeps no state per"):
        started("recalling", state_snapshots=2)
    reason = (
        r"enable_prefix_caching: layers\.0 keeps one state per sequence \(kind 'recurrent'\), not "
        r"one per token, so that requests with a common prefix share only snapshots of it, and "
    )
    with pytest.raises(ValueError, match=reason + "state_snapshots is 0"):
        started("lasting", enable_prefix_caching=True, state_snapshots=0)
    with pytest.raises(ValueError, match=reason + "there is no memory for one: lower max_num_seqs"):
        started("lasting", enable_prefix_caching=True, num_blocks=None, kv_bytes=5 * 2 * WIDTH * 8)


def test_without_snapshots_there_is_no_prefix_cache_and_the_report_says_why():
    engine = started("lasting mixed", state_snapshots=0)
    (prompt,) = prompts_of(80)
    for _ in range(2):
        (request,) = requests_of(engine, [prompt])
        assert run(engine, [request]) == [alone("lasting mixed", prompt, 8)]
        assert request.num_cached == 0
    notes = [note for note in engine.program.report.notes if note.startswith("no prefix cache")]
    assert len(notes) == 1 and notes[0].endswith("and state_snapshots is 0")
    assert engine.stats().no_prefix_cache in notes[0]


def test_the_number_of_snapshots_follows_the_memory():
    engine = started("lasting", num_blocks=None, kv_bytes=100 * 2 * WIDTH * 8)
    assert engine.stats().snapshots_total == 4  # max_num_seqs
    assert started("lasting").stats().snapshots_total == 1  # an eighth of it, without a size
    engine = started("lasting", enable_prefix_caching=False)
    assert engine.stats().snapshots_total == 0


# ---- CUDA graphs


@pytest.mark.gpu
def test_full_graph_steps_start_from_snapshots_and_go_back_to_the_state_before_drafts():
    model = toy("lasting mixed", "cuda", torch.float32)
    engine = sharing("lasting mixed", model, num_blocks=11, speculative_tokens=3, ngram_min=1)
    document, *tails = prompts_of(40, 3, 12, 7, seed=8)
    prompts = [[*document, *tail] for tail in tails] + [[1, 2, 3] * 10, [7, 8] * 12]
    for prompt, tokens in zip(prompts, run(engine, requests_of(engine, prompts, 20)), strict=True):
        ids = torch.tensor([*prompt, *tokens], device="cuda")
        logits = model(ids, torch.arange(len(ids), device="cuda"))[len(prompt) - 1 : -1]
        chosen = logits.gather(1, ids[len(prompt) :, None])[:, 0]
        assert len(tokens) == 20 and (logits.amax(-1) - chosen < 0.02 * logits.std(-1)).all()
    stats = engine.stats()
    assert stats.snapshot_hits and stats.drafted > stats.accepted > 0
    assert engine.executor.runner.steps["full graph"] > 20, engine.executor.runner.steps
