"""A server with several engines: prompts are divided among them, and one that dies takes only its
own requests with it.
"""

import json
import os
import re
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

pytest.importorskip("fastapi")
pytest.importorskip("tokenizers")
httpx = pytest.importorskip("httpx")
from prometheus_client.parser import text_string_to_metric_families  # noqa: E402
from serving import serving  # noqa: E402
from test_server_lifecycle import health, until  # noqa: E402

from atomc.runtime.config import EngineConfig  # noqa: E402
from atomc.runtime.llm import LLM  # noqa: E402
from atomc.runtime.scheduling.stats import Stats, total  # noqa: E402
from atomc.runtime.server.engines.client import (  # noqa: E402
    EngineDead,
    EngineLost,
    EngineRestarting,
    ShuttingDown,
)
from atomc.runtime.server.engines.engine_group import Engines  # noqa: E402
from atomc.runtime.server.engines.start_engines import engine_environments  # noqa: E402
from atomc.runtime.server.http.responses import client_error  # noqa: E402

pytestmark = [
    pytest.mark.xdist_group("server lifecycle"),
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]
PROMPTS = ["Once upon a time", "The king", "In the beginning", "And he said", "Two", "The sea"]
GREEDY = {"max_tokens": 12, "temperature": 0}
LONG = {"prompt": "Once", "max_tokens": 800, "ignore_eos": True, "temperature": 0, "stream": True}
RUNNING, GENERATED = "atomc:num_requests_running", "atomc:generation_tokens"


def pids(server):
    """The process of each engine, from the first lines of the log."""
    found = server.wait_for(r"engine (\d+), (\d+)")
    return [int(found[1]), int(found[2])]


def post(server, path, **body):
    answer = httpx.post(server.url + path, json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer.json()


def per_engine(server, family):
    """The number of each engine."""
    text = httpx.get(f"{server.url}/metrics", timeout=60).text
    (found,) = [each for each in text_string_to_metric_families(text) if each.name == family]
    return [sample.value for sample in found.samples if sample.labels["engine"] in "01"]


def lines_of_stream(server):
    with httpx.stream("POST", f"{server.url}/v1/completions", json=LONG, timeout=120) as answer:
        return [line.removeprefix("data: ") for line in answer.iter_lines() if line]


def kill_under_streams(server, pid):
    """Two streams, one on each engine, of which this one is killed: the lines of both, first of the
    one that was lost.
    """
    with ThreadPoolExecutor() as threads:
        streams = [threads.submit(lines_of_stream, server) for _ in range(2)]
        until(lambda: per_engine(server, RUNNING) == [1, 1])
        os.kill(pid, signal.SIGKILL)
        until(lambda: health(server).json()["status"] == "degraded")
        lost, finished = sorted((stream.result() for stream in streams), key=len)
    assert finished[-1] == "[DONE]"
    assert json.loads(finished[-2])["choices"][0]["finish_reason"] == "length"
    return json.loads(lost[-1])["error"]


@pytest.mark.rotating
def test_two_engines_share_the_prompts_and_one_goes_on_without_the_other():
    with serving("--dp", 2) as server:
        # Prompts of one HTTP request are divided, too.
        by_two = post(server, "/v1/completions", prompt=PROMPTS, **GREEDY)["choices"]
        generated = per_engine(server, GENERATED)
        assert min(generated) >= 3 and sum(generated) <= 12 * len(PROMPTS)
        status = httpx.get(f"{server.url}/status", timeout=60).json()
        assert status["stats"]["generated_tokens"] == sum(generated)
        assert len(status["engines"]) == 2 and status["sick"] is None

        error = kill_under_streams(server, pids(server)[1])
        assert error["code"] == "engine_dead"
        assert "engine 1's process was killed by signal 9" in error["message"]
        assert "another engine takes over: send the request again" in error["message"]
        assert health(server).status_code == 200
        assert health(server).json()["status"] == "degraded"
        assert "killed by signal 9" in health(server).json()["engines"]["1"]
        assert per_engine(server, "atomc:up") == [1, 0]
        by_one = post(server, "/v1/completions", prompt=PROMPTS, **GREEDY)["choices"]
        assert by_one == by_two and len({choice["text"] for choice in by_one}) == len(PROMPTS)
        assert server.process.poll() is None

        os.kill(pids(server)[0], signal.SIGKILL)
        assert server.process.wait(60) == 1
        assert "; the server ends" in server.log and "Traceback" not in server.log


@pytest.mark.slow
def test_a_dead_engine_is_restarted_while_the_other_serves():
    with serving("--dp", 2, "--restart-engine", 1) as server:
        error = kill_under_streams(server, pids(server)[0])
        assert error["code"] == "engine_restarting"
        assert (
            "engine 0 is being restarted (attempt 1 of 1): engine 0's process" in error["message"]
        )
        server.wait_for("engine 0 serves again, as process")
        assert health(server).json() == {"status": "ok"}
        assert per_engine(server, "atomc:up") == [1, 1]
        assert per_engine(server, "atomc:engine_restarts") == [1, 0]
        post(server, "/v1/completions", prompt=PROMPTS, **GREEDY)
        assert min(per_engine(server, GENERATED)) > 0


@pytest.mark.slow
def test_all_kinds_of_requests_work_with_two_engines_of_two_ranks(tmp_path):
    with serving("--dp", 2, "--tp", 2, "--profile-dir", tmp_path) as server:
        assert len(re.findall(r"engine \d: 2 ranks: 0 is process", server.log)) == 2
        body = {"prompt": PROMPTS, "n": 2, "logprobs": 1, "seed": 3, "max_tokens": 5}
        once, again = (post(server, "/v1/completions", **body)["choices"] for _ in range(2))
        assert once == again and len(once) == 2 * len(PROMPTS)
        assert [choice["index"] for choice in once] == list(range(len(once)))
        texts = post(server, "/v1/embeddings", input=PROMPTS)["data"]
        (single,) = post(server, "/v1/embeddings", input=PROMPTS[3])["data"]
        assert torch.allclose(
            torch.tensor(texts[3]["embedding"]), torch.tensor(single["embedding"]), atol=1e-5
        )
        chosen = post(
            server,
            "/v1/completions",
            prompt=PROMPTS,
            max_tokens=9,
            structured_outputs={"choice": ["a king", "a sea"]},
        )
        assert {choice["text"] for choice in chosen["choices"]} <= {"a king", "a sea"}
        # A stream whose client goes away ends on its engine.
        with httpx.stream("POST", f"{server.url}/v1/completions", json=LONG, timeout=60) as answer:
            next(answer.iter_lines())
        until(lambda: per_engine(server, RUNNING) == [0, 0])
        assert post(server, "/start_profile") == {"status": "started"}
        assert (tmp_path / post(server, "/stop_profile")["file"]).exists()
        assert httpx.get(f"{server.url}/ready", timeout=60).status_code == 200


class _Client:
    def __init__(self, dead=None, unhealthy=None, num_unfinished=0):
        self.dead, self.unhealthy_reason = dead, unhealthy or (dead and str(dead))
        self.num_unfinished, self.sent = num_unfinished, []

    def submit(self, requests, stream):
        self.sent += [request.id for request in requests]
        self.num_unfinished += len(requests)


class _Request:
    def __init__(self, name):
        self.id = name


def test_a_prompt_with_all_choices_goes_to_the_engine_with_the_fewest_requests():
    busy, hung = _Client(num_unfinished=4), _Client(unhealthy="no answer")
    dead, free = _Client(EngineDead("killed")), _Client(num_unfinished=1)
    Engines([busy, hung, dead, free]).submit(
        [_Request(name) for name in ("0/0", "0/1", "0/2", "1", "2/0", "2/1", "3")]
    )
    assert free.sent == ["0/0", "0/1", "0/2", "2/0", "2/1"]
    assert busy.sent == ["1", "3"]
    assert not hung.sent and not dead.sent
    # If no other is left, the one that does not answer may.
    Engines([hung, dead]).submit([_Request("4")])
    assert hung.sent == ["4"]


def test_without_any_engine_the_soonest_restart_is_the_reason():
    lost, late, soon = EngineLost("a"), EngineRestarting("b", 9.0), EngineRestarting("c", 2.0)
    engines = Engines([_Client(lost), _Client(late), _Client(soon)])
    with pytest.raises(EngineRestarting, match="c"):
        engines.submit([_Request("0")])
    both = Engines([_Client(lost), _Client(EngineDead("b"))])
    assert str(both.dead) == "a; b" and type(both.dead) is EngineDead
    assert both.unhealthy_reason == "a; b"
    assert isinstance(Engines([_Client(late), _Client(ShuttingDown())]).dead, ShuttingDown)
    assert Engines([_Client(lost), _Client()]).dead is None
    assert client_error(lost).headers == {"Retry-After": "1"}


def test_other_engines_remain_while_one_is_alive_or_being_restarted():
    ended, gone = _Client(EngineDead("a")), _Client(EngineLost("b"))
    assert not Engines([ended]).others_remain(ended)
    assert not Engines([ended, gone]).others_remain(ended)
    assert Engines([ended, _Client()]).others_remain(ended)
    assert Engines([ended, gone, _Client(EngineRestarting("c", 2.0))]).others_remain(ended)


def test_stats_of_engines_are_added():
    one = Stats(
        running=1,
        waiting=2,
        kv_blocks_used=3,
        kv_blocks_total=4,
        kv_tokens=50,
        max_len=16,
        steps={"eager": 2},
        host_ms=2.0,
        expert_load={"a": [1, 2]},
        prompt_limit=64,
    )
    two = replace(one, running=5, max_len=12, steps={"eager": 1, "graph": 4}, host_ms=1.0)
    two = replace(two, prompt_limit=32)
    assert total([one, two]) == Stats(
        running=6,
        waiting=4,
        kv_blocks_used=6,
        kv_blocks_total=8,
        kv_tokens=100,
        max_len=12,
        steps={"eager": 3, "graph": 4},
        host_ms=2.0,
        expert_load={"a": [2, 4]},
        prompt_limit=32,
    )
    assert total([one]) == one


def test_gpus_are_divided_among_engines_of_several_ranks(monkeypatch):
    for variable in ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    gpus = EngineConfig(device="cuda", tp=2, dp=2)
    assert engine_environments(gpus) == [
        {"CUDA_VISIBLE_DEVICES": "0,1"},
        {"CUDA_VISIBLE_DEVICES": "2,3"},
    ]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7, 5,GPU-3,1")
    assert engine_environments(gpus) == [
        {"CUDA_VISIBLE_DEVICES": "7,5"},
        {"CUDA_VISIBLE_DEVICES": "GPU-3,1"},
    ]
    assert engine_environments(replace(gpus, dp=1)) == [{}]
    assert engine_environments(EngineConfig(device="cpu", dp=3)) == [{}, {}, {}]
    with pytest.raises(ValueError, match="dp is 3, and there are 4 GPUs: each engine needs 2, all"):
        engine_environments(replace(gpus, dp=3))
    with pytest.raises(ValueError, match="device is cuda:1, but dp is 2: set device to cuda"):
        engine_environments(replace(gpus, device="cuda:1"))
    with pytest.raises(ValueError, match="an LLM is one engine: use `atomc serve --dp 2`"):
        LLM(dp=2)
    with pytest.raises(ValueError, match="dp is 0, it must be at least 1"):
        EngineConfig(dp=0)
