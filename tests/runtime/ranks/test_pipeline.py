"""A model whose layers are in several stages gives what it gives on one process, and a stage that
fails ends them all. How a model is cut is in test_stages.py.
"""

import os
import signal
import threading
from dataclasses import replace

import pytest

pytest.importorskip("zmq")
pytest.importorskip("msgspec")
pytest.importorskip("httpx")

import httpx
from serving import serving
from test_ranks import CONFIG, ENGINES, LONG, PROMPT, SOON, check_equal, failing
from test_ranks import no_groups_of_other_tests as no_groups_of_other_tests  # a fixture

from atomc.runtime.execution import worker
from atomc.runtime.llm import LLM, SamplingParams

pytestmark = [pytest.mark.xdist_group("ranks"), pytest.mark.usefixtures("compiled_once")]


@pytest.fixture(scope="module")
def stages():
    """The bundled model in two stages, of two layers and of one; the first would have memory for
    more. Its steps of 37 tokens are two micro-batches.
    """
    capacity = worker.capacity

    def more(**given):
        found = capacity(**given)
        return replace(found, num_blocks=tuple(count + 7 for count in found.num_blocks))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker, "capacity", more)
        llm = LLM(**CONFIG, **ENGINES["chunks"], pp=2)
    with llm:
        yield llm


@pytest.fixture
def small():
    with LLM(**CONFIG, num_blocks=20, pp=2, step_timeout=SOON / 2) as llm:
        yield llm


def test_two_stages_give_the_outputs_of_one_process(stages):
    check_equal("chunks", stages)
    held = {name for name, _ in stages.engine.module.named_parameters()}
    assert {name.split(".")[1] for name in held} == {"embed_tokens", "layers"}
    assert {name.split(".")[2] for name in held if "layers" in name} == {"0", "1"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "ranks"), [("drafts", {"pp": 3}), ("chunks", {"pp": 2, "tp": 2})], ids=str
)
def test_more_ranks_give_the_outputs_of_one_process(kind, ranks):
    with LLM(**CONFIG, **ENGINES[kind], **ranks) as llm:
        check_equal(kind, llm)


@pytest.mark.slow
def test_a_killed_stage_ends_the_others(small):
    (pid,) = small.engine.executor.pids.values()
    with failing(small, rf"^rank 1 \(process {pid}\) was killed by signal 9$"):
        threading.Timer(0.2, os.kill, (pid, signal.SIGKILL)).start()
        while True:
            small.generate([PROMPT], LONG)


@pytest.mark.slow
def test_a_stopped_stage_ends_the_others(small):
    (pid,) = small.engine.executor.pids.values()
    with failing(small, rf"^rank 1 \(process {pid}\) has been silent for \d s: it hangs$"):
        threading.Timer(0.2, os.kill, (pid, signal.SIGSTOP)).start()
        while True:
            small.generate([PROMPT], LONG)


@pytest.mark.slow
def test_an_error_in_one_stage_ends_the_others(small, monkeypatch):
    executor = small.engine.executor

    def broken(step):
        raise RuntimeError("broken here")

    with failing(small, "^rank 0 failed, and others did not: RuntimeError: broken here$"):
        monkeypatch.setattr(executor.worker.runner, "logits", broken)
        small.generate([PROMPT], LONG)


def test_more_stages_than_layers_are_refused_before_anything_starts():
    message = r"^3 layers do not give 4 stages one each; at most 3 do$"
    with pytest.raises(ValueError, match=message):
        LLM(**CONFIG, pp=4)
    with pytest.raises(ValueError, match="pp is 0, it must be at least 1"):
        LLM(**CONFIG, pp=0)


@pytest.mark.slow
def test_a_server_in_two_stages_answers():
    with serving("--pp", 2, "--options", "glue=eager") as server:
        assert "2 ranks: 0 is process" in server.log
        asked = {"model": "atomc-demo", "prompt": "The king", "max_tokens": 8, "temperature": 0}
        answer = httpx.post(f"{server.url}/v1/completions", json=asked, timeout=60).json()
    with LLM(device="cpu", options={"glue": "eager"}, progress=False) as llm:
        expected = llm.generate("The king", SamplingParams(max_tokens=8, temperature=0.0))
    assert answer["choices"][0]["text"] == expected[0].text
