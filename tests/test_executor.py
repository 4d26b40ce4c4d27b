"""An engine whose steps run in another process gives what it gives when they run in its own."""

import random

import pytest

pytest.importorskip("msgspec")
from remote_executor import RemoteExecutor

from atomc.runtime.engine import Engine, EngineConfig
from atomc.runtime.sampling.sampling_params import SamplingParams, Structured

pytestmark = pytest.mark.xdist_group("engine")

CONFIG = {
    "dtype": "float64",
    "device": "cpu",
    "max_model_len": 200,
    "max_num_seqs": 6,
    "seed": 0,
    "options": {"strict": True, "glue": "eager", "layout": "paged"},
}
# Chunks of prompts, and so few blocks that requests give way; with drafts, the host knows all
# tokens before a step.
ENGINES = {
    "chunks": {"max_num_batched_tokens": 37, "num_blocks": 14},
    "drafts": {"max_num_batched_tokens": 64, "num_blocks": 14, "speculative_tokens": 3},
}
KINDS = [
    {},
    {"temperature": 0.9, "top_p": 0.9},
    {"repetition_penalty": 1.3, "presence_penalty": 0.5},
    {"temperature": 0.8, "frequency_penalty": 0.7, "logprobs": 2},
    {"prompt_logprobs": 1},
    {
        "temperature": 0.8,
        "structured": Structured(regex="(the king |a queen ){3}"),
        "ignore_eos": False,
    },
    {
        "temperature": 1.0,
        "top_k": 5,
        "logit_bias": {9: 2.0},
        "min_tokens": 2,
        "stop_token_ids": (4,),
    },
]


def requests(engine):
    """Some repeat themselves, so that drafts are made, and some begin as others do; one has hidden
    states pooled.
    """
    rng = random.Random(0)
    for i in range(21):
        prompt = [11, 12, 13, 14, 15] * rng.choice([0, 4, 9]) + rng.choices(
            range(1, 40), k=rng.randint(1, 60)
        )
        params = {
            "max_tokens": rng.randint(4, 30),
            "seed": i,
            "ignore_eos": True,
            **KINDS[i % len(KINDS)],
        }
        yield engine.request(str(i), prompt, SamplingParams(**params))
    yield engine.request("mean", [*range(1, 90)], pooling="mean")


def run(engine):
    """Each call's outputs; requests come one by one."""
    assert engine.scheduler.pool.reset_prefix_cache()
    waiting, found = list(requests(engine)), []
    while waiting or engine.has_work:
        if waiting:
            engine.add(waiting.pop(0))
        found.append(engine.step())
        engine.check()
    return found


@pytest.mark.parametrize("kind", ENGINES)
def test_steps_that_run_in_another_process_give_the_same_outputs(kind, monkeypatch):
    config = EngineConfig(**CONFIG, **ENGINES[kind])
    engine = Engine(config, progress=False)
    expected = run(engine)
    done = engine.scheduler.counters
    assert (
        done.preemptions > 2
        and done.prefix_hits
        and (kind != "drafts" or done.drafted > done.accepted > 0)
    )
    assert not any(output.error for outputs in expected for output in outputs)
    remote = RemoteExecutor(config)
    try:
        assert remote.limits == engine.executor.limits
        monkeypatch.delattr(engine.executor, "runner")
        monkeypatch.setattr(engine, "executor", remote)
        assert run(engine) == expected and remote.steps > 30
    finally:
        remote.close()
    assert remote.process.exitcode == 0
