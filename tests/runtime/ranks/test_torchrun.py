"""`atomc serve` under torchrun: one group of ranks, which two agents on this machine start."""

import contextlib
import json
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from dataclasses import replace

import pytest

pytest.importorskip("zmq")
pytest.importorskip("msgspec")

import torch
import zmq
from tiny_experts import random_model, stored, write
from torch.distributed import PrefixStore, TCPStore

from atomc.options import TorchrunPlace, torchrun_place
from atomc.runtime.config import EngineConfig
from atomc.runtime.llm import LLM, SamplingParams
from atomc.runtime.ranks import torchrun
from atomc.runtime.ranks.endpoint import bind, use_tcp
from atomc.runtime.ranks.rank_settings import RankSettings, TorchSettings
from atomc.runtime.ranks.torchrun import (
    TorchrunLauncher,
    check_place,
    settings_from_rank_0,
)
from atomc.runtime.server.config import ServerConfig
from atomc.runtime.server.serve import DEMO_NAME, check_launcher, choose_drain_seconds

CONFIG = EngineConfig(tp=2, device="cpu")
SHARES_EXPERTS = EngineConfig(dp=2, ep=True, device="cpu")
LONG = {"max_position_embeddings": 4096}
SECONDS = 240


def test_the_place_of_a_process_is_read_from_torchruns_variables(monkeypatch):
    of_torchrun = {
        "TORCHELASTIC_RUN_ID": "none",
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "29500",
    }
    for name, value in of_torchrun.items():
        monkeypatch.setenv(name, value)
    assert torchrun_place() == TorchrunPlace(3, 4, 1, "10.0.0.1", 29500)
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert torchrun_place() is None
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")  # set by another launcher
    assert torchrun_place() is None


def test_what_does_not_fit_the_processes_of_torchrun_is_refused(monkeypatch):
    place = TorchrunPlace(1, 2, 1, "10.0.0.1", 29500)
    check_place(CONFIG, place)
    with pytest.raises(ValueError, match="tp is 4, which makes 4 ranks, but torchrun started 2"):
        check_place(replace(CONFIG, tp=4), place)
    check_place(SHARES_EXPERTS, place)
    with pytest.raises(ValueError, match="dp is 4 with ep, which makes 4 ranks, but torchrun st"):
        check_place(replace(SHARES_EXPERTS, dp=4), place)
    with pytest.raises(ValueError, match="dp is 2 with ep and tp is 2, which makes 4 ranks, but"):
        check_place(replace(CONFIG, dp=2, ep=True), place)
    refused = "dp is 2, which makes 2 engines, .*: run this command without torchrun, with --ray"
    for several in (
        replace(SHARES_EXPERTS, ep=False),
        replace(CONFIG, dp=2),
        replace(CONFIG, dp=2, pp=2, ep=True),
    ):
        with pytest.raises(ValueError, match=refused):
            check_place(several, place)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match="process 2 of torchrun on its host, which has 1 GPUs"):
        check_place(replace(CONFIG, device="cuda"), place)
    with pytest.raises(ValueError, match="--ray starts all ranks: run this command without"):
        check_launcher(ServerConfig(ray=True), place)
    with pytest.raises(ValueError, match="use torchrun's --max-restarts"):
        check_launcher(ServerConfig(restart_engine=1), place)


def test_answers_have_time_to_finish_before_torchrun_kills_the_server():
    place = TorchrunPlace(0, 2, 0, "10.0.0.1", 29500)
    times = [
        choose_drain_seconds(ServerConfig(drain_seconds=given), by).drain_seconds
        for given in (None, 7.0)
        for by in (None, place)
    ]
    assert times == [30, 20, 7, 7]


def test_each_rank_uses_the_gpu_of_its_number_on_its_host():
    launcher = TorchrunLauncher(TorchrunPlace(0, 4, 1, "127.0.0.1", 29500))
    assert [launcher.device("cuda", rank) for rank in range(3)] == ["cuda:1", "cuda", "cuda"]
    assert launcher.device("cpu", 0) == "cpu"


def test_a_master_that_only_its_own_host_reaches_is_refused(monkeypatch):
    launcher = TorchrunLauncher(TorchrunPlace(0, 2, 0, "node-1", 29500))
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: found)
    with pytest.raises(
        ValueError, match=r"master is node-1, which is 127\.0\.1\.1 on its own host"
    ):
        launcher.host  # noqa: B018
    found[0] = (*found[0][:4], ("10.0.0.7", 0))
    assert launcher.host == "10.0.0.7"
    found[0] = (*found[0][:4], ("127.0.0.1", 0))
    assert TorchrunLauncher(launcher.place._replace(master="127.0.0.1")).host == "127.0.0.1"


def settings(config):
    addresses = "10.0.0.1", 7, "tcp://10.0.0.1:1", "tcp://10.0.0.1:2"
    return RankSettings(1, replace(config, threads=5), *addresses, TorchSettings.current())


@pytest.fixture
def place():
    """Of rank 0, with a store that has the offer of a group that has ended."""
    store = TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
    ours = PrefixStore("atomc", store)
    ours.set("offer", json.dumps({"id": "old", "ranks": {"1": {"commands": "old"}}}))
    ours.set("old/go/other", "")
    yield TorchrunPlace(0, 2, 0, "127.0.0.1", store.port)
    assert json.loads(ours.get("old/answer/1"))["pid"] == os.getpid()


def in_thread(function, *args):
    """A future of its result, in a thread that the end of the tests does not wait for."""
    future = Future()

    def run():
        try:
            future.set_result(function(*args))
        except Exception as error:
            future.set_result(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def joined(place, *configs):
    """What rank 0 knows of the ranks 1, 2, ..., which have these configs, and what each of them is
    started with.
    """
    others = [
        in_thread(settings_from_rank_0, config, place._replace(rank=rank))
        for rank, config in enumerate(configs, 1)
    ]
    store = TCPStore(place.master, place.port, 2, is_master=False)
    PrefixStore("atomc", store).wait([f"old/answer/{rank}" for rank in range(1, len(others) + 1)])
    given = [replace(settings(CONFIG), rank=rank) for rank in range(1, len(others) + 1)]
    rank_0 = in_thread(TorchrunLauncher(place).start, given)
    return [each.result(20) for each in (rank_0, *others)]


def test_a_rank_gets_the_addresses_of_rank_0_and_not_those_of_a_group_that_ended(place):
    ranks, started = joined(place, replace(CONFIG, threads=9))
    assert started == settings(CONFIG)
    assert ranks[1].pid == os.getpid() and ranks[1].host == socket.gethostname()


def test_rank_0_says_which_ranks_it_waits_for(place, monkeypatch, caplog):
    monkeypatch.setattr(torchrun, "TELL_SECONDS", 0.2)
    store = TCPStore(place.master, place.port, 2, is_master=False)
    PrefixStore("atomc", store).set("old/answer/1", json.dumps({"pid": os.getpid()}))
    with caplog.at_level("WARNING", "atomc"):
        answers = in_thread(torchrun._answers, PrefixStore("atomc", store), "old", [1, 2, 3])
        time.sleep(1)
        assert "for rank 2, 3: was torchrun started on all hosts" in caplog.text
        for rank in (2, 3):
            PrefixStore("atomc", store).set(f"old/answer/{rank}", json.dumps({"pid": rank}))
        assert [each["pid"] for each in answers.result(20).values()] == [os.getpid(), 2, 3]


def test_a_rank_with_other_flags_ends_the_start_of_all(place):
    errors = joined(place, CONFIG, replace(CONFIG, max_num_seqs=7), replace(CONFIG, tp=4))
    assert [type(error) for error in errors] == [ValueError] * 4
    assert {str(error) for error in errors} == {
        "rank 2 was started with max_num_seqs 7 instead of None; rank 3 was started with tp 4 "
        "instead of 2"
    }


CONNECTS_TO_NOTHING = """
import pickle, sys, time
from atomc.runtime.ranks import rank
rank.CONNECT_SECONDS = 0.5
rank.Rank(pickle.load(sys.stdin.buffer))
time.sleep(60)
"""


def test_a_rank_that_does_not_reach_rank_0_ends():
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    ended = subprocess.run(
        [sys.executable, "-c", CONNECTS_TO_NOTHING],
        input=pickle.dumps(replace(settings(CONFIG), commands=address, reports=address)),
        capture_output=True,
        timeout=50,
    )
    assert ended.returncode == 1
    assert f"rank 1 has not reached rank 0 at {address} within 0.5 s" in ended.stderr.decode()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_socket_on_a_port_has_the_address_that_other_hosts_connect_to(tmp_path, host):
    with contextlib.ExitStack() as stack:
        context = stack.enter_context(zmq.Context())
        receiver, sender = (stack.enter_context(context.socket(k)) for k in (zmq.PULL, zmq.PUSH))
        try:
            address = bind(receiver, tmp_path / "file", host)
        except zmq.ZMQError:
            pytest.skip(f"this machine has no {host}")
        assert re.fullmatch(
            rf"tcp://{re.escape(f'[{host}]' if ':' in host else host)}:\d+", address
        )
        use_tcp(sender, address)
        sender.connect(address)
        sender.send(b"step")
        assert receiver.poll(5000) and receiver.recv() == b"step"


class Agent:
    """torchrun on a host of its own: `number` of so many hosts, with so many processes."""

    def __init__(self, number, port, *flags, hosts, processes):
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes", hosts),
            *("--node-rank", number, "--nproc-per-node", processes),
            *("--master-addr", "127.0.0.1", "--master-port", port),
            *("-m", "atomc", "serve", *flags, "--device", "cpu", "--port", 0),
        ]
        self.process = subprocess.Popen(
            list(map(str, command)),
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        self.lines = []
        threading.Thread(target=lambda: self.lines.extend(self.process.stderr), daemon=True).start()

    def wait_for(self, pattern):
        until = time.monotonic() + SECONDS
        while not (found := re.search(pattern, "".join(self.lines))):
            assert time.monotonic() < until, f"no {pattern}: {''.join(self.lines)}"
            time.sleep(0.1)
        return found


@contextlib.contextmanager
def started_agents(*flags, hosts=2, processes=1):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    agents = [
        Agent(number, port, *flags, hosts=hosts, processes=processes) for number in range(hosts)
    ]
    try:
        yield agents
    finally:
        for agent in agents:
            agent.process.terminate()
        for agent in agents:
            agent.process.wait(60)


@pytest.fixture
def httpx():
    """The client of the tests that start a server."""
    pytest.importorskip("fastapi")
    return pytest.importorskip("httpx")


def error_after_kill(httpx, url, pid, **body):
    """The error of a stream during which this process is killed; it arrives within 10 seconds."""
    body |= {"ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=120) as answer:
        lines = answer.iter_lines()
        next(lines)
        os.kill(pid, signal.SIGKILL)
        began = time.monotonic()
        error = json.loads([line for line in lines if line][-1].removeprefix("data: "))
    assert time.monotonic() - began < 10
    return error["error"]["message"]


@pytest.mark.slow
def test_two_agents_serve_one_model_and_end_together(httpx):
    body = {"model": DEMO_NAME, "prompt": "In the beginning", "max_tokens": 12, "temperature": 0}
    with started_agents("--tp", 2, "--dtype", "float64") as (first, second):
        url = first.wait_for(r"listening on (\S+)")[1]
        pid = int(first.wait_for(r"2 ranks: 0 is process \d+, 1 is process (\d+) on ")[1])
        second.wait_for(f"process {pid} is rank 1 of 2")
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=120)
        llm = LLM(device="cpu", threads=1, dtype="float64", progress=False)
        (output,) = llm.generate([body["prompt"]], SamplingParams(max_tokens=12, temperature=0))
        assert answer.json()["choices"][0]["text"] == output.text
        first.process.send_signal(signal.SIGTERM)
        assert second.process.wait(60) == 0

    with started_agents("--tp", 2, "--dtype", "float64") as (first, second):
        url = first.wait_for(r"listening on (\S+)")[1]
        pid = int(first.wait_for(r"1 is process (\d+) on ")[1])
        error = error_after_kill(httpx, url, pid, **(body | {"max_tokens": 1500}))
        assert "closed its connection: it has ended" in error
        assert first.process.wait(60) == 1 and second.process.wait(60) == 1


PROMPTS = [[1 + (7 * i + 3 * j) % 90 for j in range(1 + 5 * i)] for i in range(6)]


@pytest.fixture
def mixture(tmp_path):
    """The folder of a mixture of experts without a tokenizer."""
    return write(tmp_path, "qwen3_moe", stored(random_model("qwen3_moe", **LONG)), **LONG)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hosts", "processes"), [pytest.param(1, 2, id="one host"), pytest.param(2, 1, id="two hosts")]
)
def test_ranks_with_requests_of_their_own_serve_the_tokens_of_one(httpx, mixture, hosts, processes):
    flags = ("--dtype", "float64", "--max-model-len", 64, "--num-blocks", 40)
    body = {"model": mixture.name, "prompt": PROMPTS, "max_tokens": 8, "temperature": 0}
    body |= {"ignore_eos": True, "return_token_ids": True}
    with LLM(mixture, dtype="float64", device="cpu", threads=1, progress=False) as llm:
        outputs = llm.generate(
            PROMPTS, SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
        )
    with started_agents(
        mixture, "--dp", 2, "--ep", *flags, hosts=hosts, processes=processes
    ) as agents:
        first, last = agents[0], agents[-1]
        url = first.wait_for(r"listening on (\S+)")[1]
        pid = int(first.wait_for(r"2 ranks: 0 is process \d+, 1 is process (\d+) on ")[1])
        last.wait_for(f"process {pid} is rank 1 of 2")
        # Each rank has blocks of its own.
        first.wait_for(f"cache: {2 * 40 * 16} tokens")
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=120)
        found = [tuple(choice["token_ids"]) for choice in answer.json()["choices"]]
        assert found == [output.token_ids for output in outputs]
        assert len(set(found)) == len(PROMPTS)
        os.kill(int(first.wait_for(r"server is process (\d+)")[1]), signal.SIGTERM)
        # torchrun exits with 0 if all its processes have.
        assert [agent.process.wait(60) for agent in agents] == [0] * hosts


@pytest.mark.slow
def test_clients_learn_that_a_rank_of_the_same_torchrun_died(httpx, mixture):
    with started_agents(mixture, "--dp", 2, "--ep", hosts=1, processes=2) as (agent,):
        url = agent.wait_for(r"listening on (\S+)")[1]
        pid = int(agent.wait_for(r"1 is process (\d+) on ")[1])
        error = error_after_kill(
            httpx, url, pid, model=mixture.name, prompt=PROMPTS[0], max_tokens=3000
        )
        # torchrun has sent SIGTERM to the server meanwhile.
        assert f"rank 1 (process {pid} on " in error
        assert "closed its connection: it has ended" in error
        assert agent.process.wait(60) == 1
