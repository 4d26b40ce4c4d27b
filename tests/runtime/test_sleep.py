"""sleep frees the memory that is no weight, and after wake_up everything computes as before."""

import gc
from functools import partial

import pytest
import torch
from embeddings import embed
from test_rollouts import GREEDY, PROMPT, built, own_tokens, rollouts, train
from tiny_mtp import QWENS, tiny_model
from tracked_bytes import TrackedBytes

from atomc.errors import RunError
from atomc.ops.state import StateSpec
from atomc.runtime.llm import LLM
from atomc.runtime.requests.sampling_params import SamplingParams

pytestmark = [pytest.mark.xdist_group("runtime"), pytest.mark.usefixtures("compiled_once")]
SMALL = 4096  # bytes of what steps leave behind
DRAFTED = SamplingParams(max_tokens=24, ignore_eos=True)


def with_drafts():
    """State of three kinds: blocks of attention, rows of a delta net, blocks of a draft layer."""
    llm = LLM(
        tiny_model(**QWENS["qwen3_next"]),
        speculative="mtp",
        num_blocks=300,
        max_num_seqs=8,
        max_model_len=128,
        state_snapshots=4,
        options={"glue": "eager"},
        progress=False,
    )
    llm.engine.scheduler.snapshots.least = llm.engine.scheduler.snapshots.interval = 16
    return llm


def state_bytes(llm):
    caches = [*llm.engine.executor.runner.caches]
    if (draft := llm.engine.executor.runner.draft) is not None:
        caches += draft.caches
    storages = {
        x.untyped_storage().data_ptr(): x.untyped_storage().nbytes()
        for tensors in caches
        for x in tensors.values()
    }
    return sum(storages.values())


@pytest.mark.parametrize(
    "kind", ["attention", pytest.param("attention, delta nets and drafts", marks=pytest.mark.slow)]
)
def test_asleep_no_byte_of_state_is_held_and_awake_the_tokens_are_the_same(kind):
    params = GREEDY if kind == "attention" else DRAFTED
    llm = rollouts(built()) if kind == "attention" else with_drafts()
    (before,) = llm.generate([PROMPT], params)
    embed(llm.engine, [PROMPT])  # a program of its own over the same state
    state = state_bytes(llm)
    with TrackedBytes() as tracked:
        awake = tracked.held()
        for _ in range(2):
            llm.sleep()
            llm.sleep()
            gc.collect()
            assert llm.is_sleeping and 0 <= awake - tracked.held() - state < SMALL
            llm.wake_up()
            llm.wake_up()
            assert not llm.is_sleeping and state_bytes(llm) == state
            assert abs(tracked.held() - awake) < SMALL
            (found,) = llm.generate([PROMPT], params)
            assert found.token_ids == before.token_ids and found.num_cached == 0
            (again,) = llm.generate([PROMPT], params)
            assert again.token_ids == before.token_ids and again.num_cached > 0
            assert embed(llm.engine, [PROMPT])
    assert state > (30_000 if kind == "attention" else 300_000)


def test_asleep_generating_is_one_error_and_weights_may_change():
    model = built()
    llm, optimizer = rollouts(model), torch.optim.AdamW(model.parameters(), lr=0.03)
    (before,) = llm.generate([PROMPT], GREEDY)
    llm.sleep()
    for call in (llm.generate, llm.score, partial(embed, llm.engine)):
        with pytest.raises(RunError, match=r"the model sleeps, .*: call wake_up"):
            call([PROMPT])
    with pytest.raises(RunError, match="the model sleeps"):
        llm.engine.prepare_pooling()
    train(model, optimizer)
    assert own_tokens(model) != list(before.token_ids)  # the owner computes with it meanwhile
    llm.wake_up()
    (found,) = llm.generate([PROMPT], GREEDY)
    assert list(found.token_ids) == own_tokens(model)


def test_what_cannot_sleep_or_wake_is_refused_and_changes_nothing():
    llm = LLM(options={"glue": "eager"}, device="cpu", num_blocks=32, progress=False)
    for level in (0, 2):
        with pytest.raises(ValueError, match=f"level is {level}, expected 1, which frees the KV"):
            llm.sleep(level)
    text = llm.generate("Once upon a time", GREEDY)[0].text
    stream = llm.stream("Once upon a time", GREEDY)
    pieces = [next(stream)]
    with pytest.raises(ValueError, match="1 requests wait or run, expected none"):
        llm.sleep()
    assert "".join([*pieces, *stream]) == text
    llm.sleep()
    with pytest.raises(ValueError, match="tags has scheduler, expected weights and kv_cache"):
        llm.wake_up(["scheduler"])
    llm.wake_up(["weights"])
    assert llm.is_sleeping  # as trainers do it, in two calls
    llm.wake_up(["kv_cache"])
    assert llm.generate("Once upon a time", GREEDY)[0].text == text


def test_without_memory_it_sleeps_on(monkeypatch):
    llm = rollouts(built())
    (before,) = llm.generate([PROMPT], GREEDY)
    llm.sleep()

    def fails(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(StateSpec, "allocate", fails)
        with pytest.raises(ValueError, match="out of memory, the engine sleeps on"):
            llm.wake_up()
    assert llm.is_sleeping
    llm.wake_up()
    assert llm.generate([PROMPT], GREEDY)[0].token_ids == before.token_ids
