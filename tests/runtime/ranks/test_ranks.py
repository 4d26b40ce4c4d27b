"""A model on several processes gives what it gives on one, and a rank that fails ends them all."""

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("zmq")
pytest.importorskip("msgspec")

import torch
from fake_group import without_groups
from test_server_lifecycle import until
from torch import distributed, nn

from atomc import demo
from atomc.errors import RunError
from atomc.parallel.vocab import LogitsOfRank
from atomc.runtime.execution import worker
from atomc.runtime.llm import LLM, SamplingParams
from atomc.runtime.ranks import executor, monitor, rank
from atomc.runtime.ranks.messages import SampleStep
from atomc.runtime.ranks.rank_failed import RankFailed
from atomc.runtime.requests.sampling_params import Structured
from atomc.runtime.scheduling.step import Chunk, ScheduledStep
from atomc.torch_compat import peer_memory

pytestmark = [pytest.mark.xdist_group("ranks"), pytest.mark.usefixtures("compiled_once")]


@pytest.fixture(scope="module", autouse=True)
def no_groups_of_other_tests():
    with without_groups():
        yield


CONFIG = {
    "dtype": "float64",
    "device": "cpu",
    "max_model_len": 200,
    "max_num_seqs": 6,
    "seed": 0,
    "options": {"strict": True, "glue": "eager", "layout": "paged"},
    "progress": False,
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
PROMPT = [11, 12, 13, 14, 15]
LONG = SamplingParams(max_tokens=100, ignore_eos=True)
# Which request is aborted after so many calls.
ABORTED = {9: "7", 14: "12"}
# From the failure of a rank to the error, in seconds.
SOON = 10.0


def requests(engine):
    """Some repeat themselves, so that drafts are made, and some begin as others do; one has hidden
    states pooled.
    """
    rng = random.Random(0)
    for i in range(21):
        prompt = PROMPT * rng.choice([0, 4, 9]) + rng.choices(range(1, 40), k=rng.randint(1, 60))
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
    engine.reset_prefix_cache()
    waiting, found = list(requests(engine)), []
    while waiting or engine.has_work:
        if waiting:
            engine.add(waiting.pop(0))
        if len(found) in ABORTED:
            assert engine.abort(ABORTED[len(found)])
        found.append(engine.step())
        engine.check()
    return found


@cache
def of_one(kind):
    """The limits and the outputs of the model on one process."""
    engine = LLM(**CONFIG, **ENGINES[kind]).engine
    expected = run(engine)
    done = engine.scheduler.counters
    assert done.preemptions > 2 and done.prefix_hits
    assert kind != "drafts" or done.drafted > done.accepted > 0
    assert not any(output.error for outputs in expected for output in outputs)
    return engine.executor.limits, expected


def check_equal(kind, llm):
    """The model on one process gives the same outputs, call by call."""
    limits, expected = of_one(kind)
    assert llm.engine.executor.limits == limits
    assert run(llm.engine) == expected


@pytest.fixture(scope="module")
def two():
    """Two ranks, of which rank 0 would have memory for more."""
    capacity = worker.capacity

    def more(**given):
        found = capacity(**given)
        return replace(found, num_blocks=tuple(count + 7 for count in found.num_blocks))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker, "capacity", more)
        llm = LLM(**CONFIG, **ENGINES["chunks"], tp=2)
    with llm:
        yield llm


@pytest.fixture
def small(tmp_path):
    """A model of two layers on two ranks, with dummy weights."""
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 64,
    }
    config = json.loads((Path(demo.PATH) / "config.json").read_text())
    config.pop("layer_types", None)
    (tmp_path / "config.json").write_text(json.dumps({**config, **sizes}))
    with LLM(
        tmp_path, **CONFIG, load_format="dummy", num_blocks=20, tp=2, step_timeout=SOON / 2
    ) as llm:
        yield llm


def state(pid):
    """The state of a process in the letters of ps; X: there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def is_alive(pid):
    return state(pid) not in "XZ"


@contextlib.contextmanager
def failing(llm, message):
    """The calls in this context raise RankFailed with this message, within SOON; so do later ones,
    and no process remains.
    """
    began, pids = time.monotonic(), llm.engine.executor.pids
    with pytest.raises(RankFailed, match=message):
        yield
    assert time.monotonic() - began < SOON
    with pytest.raises(RankFailed, match=message):
        llm.generate([PROMPT])
    llm.close()
    assert not any(is_alive(pid) for pid in pids.values())
    assert not distributed.is_initialized()


def in_third_launch(monkeypatch, of, happens):
    """`happens` before the third launch of this executor or worker."""
    launch, steps = of.launch, []

    def launched(step):
        steps.append(step)
        if len(steps) == 3:
            happens()
        return launch(step)

    monkeypatch.setattr(of, "launch", launched)


def wait_without(llm, monkeypatch, number):
    """Rank 0 waits in a collective of its third step for rank 1, which this signal has ended or
    stopped before it took part: ranks in different collectives would end the process in gloo.
    """
    executor = llm.engine.executor
    (pid,) = executor.pids.values()

    def happens():
        os.kill(pid, number)
        until(lambda: state(pid) in "TXZ", SOON)

    in_third_launch(monkeypatch, executor, happens)


def test_two_ranks_give_the_outputs_of_one(two):
    check_equal("chunks", two)
    counts = two.engine.executor.counts()
    assert sum(counts.steps.values()) > 30
    assert "all 2 ranks compiled the same: this report is of each" in two.program.report.notes
    # Rank 1 has fewer blocks.
    assert two.engine.executor.limits.capacity.num_blocks == (ENGINES["chunks"]["num_blocks"],)


READS_ALL = [
    {"temperature": 0.8},
    {"logprobs": 1},
    {"prompt_logprobs": 1},
    {"repetition_penalty": 1.2},
    {"logit_bias": {9: -1.0}},
    {"min_tokens": 2},
    {"structured": Structured(regex="(the king |a queen )+"), "ignore_eos": False},
]


def test_steps_of_greedy_requests_gather_no_logits(two, monkeypatch):
    gathered, gather = [], LogitsOfRank.gathered

    def counted(self, logits):
        gathered.append(len(logits))
        return gather(self, logits)

    monkeypatch.setattr(LogitsOfRank, "gathered", counted)
    assert "all_gather" not in two.program.report.num_ops
    assert any("after the program" in note for note in two.program.report.notes)
    greedy = SamplingParams(max_tokens=3, ignore_eos=True)
    two.generate([PROMPT, PROMPT * 9], greedy)
    assert not gathered
    for fields in READS_ALL:
        two.generate([PROMPT], replace(greedy, **fields))
        assert gathered, fields
        gathered.clear()


@pytest.mark.rotating
def test_ranks_sleep_and_wake_up_together(two):
    (before,) = two.generate([PROMPT])
    two.sleep()
    with pytest.raises(RunError, match="the model sleeps"):
        two.generate([PROMPT])
    assert not two.engine.executor.worker.runner.caches
    two.wake_up()
    (found,) = two.generate([PROMPT])
    assert found.token_ids == before.token_ids and found.num_cached == 0


def test_a_step_that_fails_in_all_ranks_alike_leaves_them_as_they_were(two):
    expected = two.generate([PROMPT])[0].token_ids
    broken = ScheduledStep((Chunk("unknown", slot=5, tokens=(1,), start=0, blocks=()),))
    with pytest.raises(KeyError):
        two.engine.executor.launch(broken)
    assert two.generate([PROMPT])[0].token_ids == expected


@pytest.fixture
def ctrl_c_raises():
    """Also where a shell has started the tests in the background, with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.rotating
@pytest.mark.usefixtures("ctrl_c_raises")
def test_ctrl_c_waits_for_the_end_of_a_launch(two, monkeypatch):
    expected = two.generate([PROMPT])[0].token_ids
    executor = two.engine.executor
    with monkeypatch.context() as patch:
        launch, launched = executor.worker.launch, []

        def interrupted(step):
            signal.raise_signal(signal.SIGINT)
            launched.append(launch(step))
            return launched[-1]

        patch.setattr(executor.worker, "launch", interrupted)
        with pytest.raises(KeyboardInterrupt):
            two.generate([PROMPT])
        assert len(launched) == 1
    assert two.generate([PROMPT])[0].token_ids == expected


@pytest.mark.rotating
def test_a_stopped_rank_ends_the_others(two, monkeypatch):
    (pid,) = two.engine.executor.pids.values()
    wait_without(two, monkeypatch, signal.SIGSTOP)
    with failing(two, rf"^rank 1 \(process {pid}\) has been silent for \d s: it hangs$"):
        two.generate([PROMPT], LONG)


@pytest.mark.slow
def test_two_ranks_give_the_outputs_of_one_with_drafts():
    with LLM(**CONFIG, **ENGINES["drafts"], tp=2) as llm:
        check_equal("drafts", llm)


@pytest.mark.slow
@pytest.mark.parametrize("in_a_cycle", [False, True])
def test_ranks_of_an_llm_that_is_dropped_end_and_another_one_starts(in_a_cycle):
    llm = LLM(**CONFIG, tp=2)
    (pid,), expected = llm.engine.executor.pids.values(), llm.generate([PROMPT])
    if in_a_cycle:
        llm.itself = llm
    else:
        with pytest.raises(ValueError, match="close another LLM of several ranks first"):
            LLM(**CONFIG, tp=2)
    del llm
    with LLM(**CONFIG, tp=2) as llm:
        assert not is_alive(pid) and llm.generate([PROMPT]) == expected


@pytest.mark.slow
def test_each_rank_returns_the_memory_of_its_cache():
    def mapped(pid):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * os.sysconf("SC_PAGESIZE")

    with LLM(**CONFIG, tp=2, num_blocks=20_000) as llm:
        (pid,) = llm.engine.executor.pids.values()
        caches = llm.engine.executor.worker.runner.caches
        size = sum(tensor.nbytes for tensors in caches for tensor in tensors.values())
        awake = mapped(pid)
        llm.sleep()
        assert awake - mapped(pid) > 0.9 * size > 100 << 20
        llm.wake_up()
        assert abs(mapped(pid) - awake) < 0.1 * size
        assert llm.generate([PROMPT])[0].error is None


@pytest.mark.slow
def test_a_killed_rank_ends_the_others(small):
    (pid,) = small.engine.executor.pids.values()
    with failing(small, rf"^rank 1 \(process {pid}\) was killed by signal 9$"):
        threading.Timer(0.2, os.kill, (pid, signal.SIGKILL)).start()
        while True:
            small.generate([PROMPT], LONG)


@pytest.mark.slow
def test_a_rank_that_is_killed_in_a_step_ends_the_others(small, monkeypatch):
    wait_without(small, monkeypatch, signal.SIGKILL)
    with failing(small, "^rank 1 .* was killed by signal 9$"):
        small.generate([PROMPT], LONG)


@pytest.mark.slow
def test_a_step_that_fails_in_rank_0_alone_ends_the_others(small, monkeypatch):
    def fail():
        raise RuntimeError("broken here")

    in_third_launch(monkeypatch, small.engine.executor.worker, fail)
    with failing(small, "^rank 0 failed, and others did not: RuntimeError: broken here$"):
        small.generate([PROMPT], LONG)


@pytest.mark.slow
@pytest.mark.parametrize("waits", [False, True])
def test_an_error_in_one_rank_is_reported_with_its_rank(small, waits):
    with failing(small, "^rank 1 .* failed: KeyError: 999$"):
        with small.engine.executor._monitor.sending(lambda n: SampleStep(n, 999), of_step=True):
            if waits:
                distributed.all_reduce(torch.ones(1))
        while True:
            small.generate([PROMPT], LONG)


@pytest.mark.slow
def test_a_step_that_does_not_end_ends_the_ranks(small, monkeypatch):
    # Rank 1 waits in the first collective of the step.
    wait = partial(distributed.recv, torch.ones(1), 1)
    in_third_launch(monkeypatch, small.engine.executor.worker, wait)
    with failing(small, r"^no rank has completed a step after 5 s \(--step-timeout\)$"):
        small.generate([PROMPT], LONG)


@pytest.mark.slow
def test_tokens_that_differ_end_the_ranks(small, monkeypatch):
    sampler = type(small.engine.executor.worker.outputs.sampler)
    call = sampler.__call__

    def other(*args, **given):
        sampled = call(*args, **given)
        return replace(sampled, tokens=(sampled.tokens + 1) % 64)

    monkeypatch.setattr(sampler, "__call__", other)
    drawn = replace(LONG, temperature=1.0)  # greedy tokens need no sampler
    with failing(small, "^rank 1 .* sampled other tokens than rank 0$"):
        while True:
            small.generate([PROMPT], drawn)


@pytest.mark.slow
def test_a_group_that_was_stopped_as_a_whole_goes_on(small, monkeypatch):
    (pid,) = small.engine.executor.pids.values()
    expected = small.generate([PROMPT])[0].token_ids
    # The thread that watches does not run, either.
    receive = monitor.Monitor._receive

    def stopped(watching):
        monkeypatch.setattr(monitor.Monitor, "_receive", receive)
        os.kill(pid, signal.SIGSTOP)
        time.sleep(2 * monitor.SILENT_SECONDS)
        os.kill(pid, signal.SIGCONT)

    monkeypatch.setattr(monitor.Monitor, "_receive", stopped)
    time.sleep(2 * monitor.SILENT_SECONDS + 1)
    assert small.generate([PROMPT])[0].token_ids == expected


def test_results_of_a_group_that_has_failed_are_its_failure():
    group = monitor.Monitor(2, 1.0)
    group._fail("rank 1 ended")
    with pytest.raises(RankFailed, match="rank 1 ended"):
        group.wait_done(7, [1])
    group.close()


class EndedRank:
    """A rank whose process has ended."""

    pid, host = 1, None

    def how_it_ended(self):
        return "was killed by signal 9"

    def kill(self):
        pass


def broken(*args):
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def test_a_failure_is_told_also_where_the_device_of_rank_0_is_broken(monkeypatch, caplog):
    monkeypatch.setattr(peer_memory, "abort", broken)
    told = threading.Event()
    group = monitor.Monitor(2, 1.0, lambda failure: told.set())
    group.watch({1: EndedRank()})
    assert told.wait(SOON)
    group.close()
    assert "an illegal memory access" in caplog.text


def test_graphs_are_dropped_after_what_they_wait_for_is_aborted(monkeypatch):
    aborted = threading.Event()

    def abort():
        time.sleep(0.5)
        aborted.set()

    monkeypatch.setattr(peer_memory, "abort", abort)
    group = monitor.Monitor(2, 1.0)
    group.watch({1: EndedRank()})
    until(lambda: group._failure is not None, SOON)
    dropped = []
    runner = SimpleNamespace(drop_graphs=lambda: dropped.append(aborted.is_set()))
    executor._end(group, [SimpleNamespace(runner=runner)])
    assert dropped == [True]


NO_SUCH_DEVICE = """
from torch import distributed
from atomc.runtime.engine import Engine, EngineConfig
from atomc.runtime.ranks.local_launcher import LocalLauncher
from atomc.runtime.ranks.rank_failed import RankFailed

class NoSuchDevice(LocalLauncher):
    def device(self, kind, rank):
        return "cuda:99" if rank == 1 else kind

try:
    Engine(EngineConfig(**{config}, tp=2), progress=False, rank_launcher=NoSuchDevice())
except RankFailed as error:
    print("in a group" if distributed.is_initialized() else error)
"""


@pytest.mark.rotating
def test_a_rank_without_its_device_ends_the_start():
    config = {name: CONFIG[name] for name in CONFIG if name != "progress"}
    program = NO_SUCH_DEVICE.replace("{config}", repr(config))
    # A process, because the start that does not end would not end this one.
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
    )
    assert re.match(r"rank 1 .* failed: .*(CUDA|NVIDIA)", done.stdout), done.stderr


def test_a_rank_with_a_gpu_has_its_masks_in_pinned_memory(monkeypatch):
    pinned = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda rows: pinned.append(rows) or rows)
    mask = torch.tensor([[1, -2, 3], [4, 5, 6]], dtype=torch.int32)
    assert torch.equal(rank._tensor(mask.numpy().tobytes(), 2), mask) and len(pinned) == 1
    assert rank._tensor(None, 0) is None


def test_sizes_that_do_not_fit_are_refused_before_anything_starts(monkeypatch):
    with pytest.raises(ValueError, match=r"heads.* do not divide by 3"):
        LLM(**CONFIG, tp=3)
    with pytest.raises(ValueError, match="tp is 0, it must be at least 1"):
        LLM(**CONFIG, tp=0)
    with pytest.raises(ValueError, match=r"module of this process.* atomc\.parallelize"):
        LLM(nn.Linear(1, 1), tp=2)
    with pytest.raises(ValueError, match="device is cuda:1, but tp is 2: set device to cuda"):
        LLM(**{**CONFIG, "device": "cuda:1"}, tp=2)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match="tp is 2, and there are 1 GPUs: each rank needs one"):
        LLM(**{**CONFIG, "device": "cuda"}, tp=2)
    monkeypatch.setattr(distributed, "is_initialized", lambda: True)
    with pytest.raises(ValueError, match="this process has a process group"):
        LLM(**CONFIG, tp=2)


@pytest.mark.slow
def test_a_program_that_is_killed_leaves_no_rank():
    program = (
        "from atomc.runtime.llm import LLM\n"
        f"llm = LLM(**{CONFIG}, num_blocks=14, tp=2)\n"
        "print(llm.engine.executor.pids[1], flush=True)\n"
        "input()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        pid = int(process.stdout.readline())
        assert is_alive(pid)
        process.kill()
    until(lambda: not is_alive(pid), SOON)
