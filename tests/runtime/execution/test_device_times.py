"""How long the device runs steps and waits for the host, by a stand-in for events and clock."""

import time

import pytest
import torch
from test_expert_load import metrics_of, stats_of

from atomc.runtime.constrained.grammar_compiler import GrammarCompiler
from atomc.runtime.engine import Engine, EngineConfig
from atomc.runtime.execution.device_times import DeviceTimes
from atomc.runtime.requests.sampling_params import SamplingParams, Structured
from atomc.runtime.scheduling.stats import total


class Device:
    """A device that runs each launch at once, and has reached all events up to `reached`."""

    def __init__(self, monkeypatch):
        self.ms, self.reached, self.num_events = 0.0, float("inf"), 0
        monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: Event(self))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
        monkeypatch.setattr(time, "perf_counter", lambda: 1e-3 * self.ms)

    def taking(self, ms, call):
        """The call, which takes so many milliseconds."""

        def timed(*args, **kwargs):
            self.ms += ms
            return call(*args, **kwargs)

        return timed


class Event:
    """As torch.cuda.Event, which has other methods, too: those wait for the device."""

    def __init__(self, device):
        self.device, device.num_events = device, device.num_events + 1

    def record(self, stream):
        self.ms = self.device.ms

    def query(self):
        return self.ms <= self.device.reached

    def elapsed_time(self, end):
        assert self.query() and end.query()
        return end.ms - self.ms


@pytest.fixture
def device(monkeypatch):
    return Device(monkeypatch)


@pytest.fixture
def times(device):
    return DeviceTimes(torch.device("cuda"))


def run_span(device, times, wait, ms):
    device.ms += wait
    times.begin()
    device.ms += ms
    times.end()


def milliseconds(times):
    return pytest.approx((1e3 * times.busy, 1e3 * times.idle))


def test_the_device_is_busy_in_a_span_and_idle_between_two(device, times):
    for wait, ms in ((7, 2), (3, 5), (1, 4)):
        run_span(device, times, wait, ms)
    times.read()
    assert milliseconds(times) == (11, 4)


def test_a_span_begins_with_its_first_launch(device, times):
    times.begin()
    run_span(device, times, 2, 3)
    times.end()  # of nothing: no span has begun
    times.read()
    assert milliseconds(times) == (5, 0)


def test_what_the_device_has_not_reached_counts_later(device, times):
    run_span(device, times, 0, 2)
    run_span(device, times, 1, 2)
    device.reached = 4
    times.read()
    assert milliseconds(times) == (2, 0)
    device.reached = 5
    times.read()
    assert milliseconds(times) == (4, 1)


def test_time_without_requests_is_not_idle(device, times):
    run_span(device, times, 0, 2)
    run_span(device, times, 1, 2)
    times.pause()
    run_span(device, times, 1000, 2)
    times.read()
    assert milliseconds(times) == (6, 1)
    times.forget()
    run_span(device, times, 1000, 2)
    times.read()
    assert milliseconds(times) == (2, 0)


def test_events_are_used_again(device, times):
    for _ in range(50):
        run_span(device, times, 1, 1)
        run_span(device, times, 1, 1)
        times.read()
    assert device.num_events <= 5


def test_a_cpu_is_busy_while_the_host_computes_a_span(device):
    times = DeviceTimes(torch.device("cpu"))
    for wait, ms in ((7, 2), (3, 5)):
        run_span(device, times, wait, ms)
    times.read()
    assert milliseconds(times) == (7, 3)
    assert not device.num_events, "CUDA is asked for events"


NEW = 5
SCHEDULE, FORWARD, MASK, SAMPLE = 1, 10, 100, 1000


@pytest.mark.parametrize("constrained", [False, True])
def test_an_engine_measures_launches_and_what_is_between_them(device, monkeypatch, constrained):
    """Scheduling and masks are time of the host, which the device waits for."""
    engine = Engine(
        EngineConfig(dtype="float32", device="cpu", max_num_seqs=2, kv_bytes=2**24),
        progress=False,
    )
    executor = engine.executor
    for owner, name, ms in (
        (engine.scheduler, "next_step", SCHEDULE),
        (executor.runner, "_run", FORWARD),
        (GrammarCompiler, "fill", MASK),
        (executor.outputs.sampler, "draw", SAMPLE),
    ):
        monkeypatch.setattr(owner, name, device.taking(ms, getattr(owner, name)))
    params = SamplingParams(
        max_tokens=NEW,
        ignore_eos=not constrained,
        structured=Structured(regex="[a-z ]{99}") if constrained else None,
    )
    for name in "ab":  # one after the other
        device.ms += 1e6
        engine.add(engine.request(name, [5, 6, 7], params))
        while engine.has_work:
            engine.step()
    stats = engine.stats()
    between = (NEW - 1) * SCHEDULE + NEW * MASK * constrained
    assert 1e3 * stats.device_busy == pytest.approx(2 * NEW * (FORWARD + SAMPLE))
    assert 1e3 * stats.device_idle == pytest.approx(2 * between)
    executor.forget_counts()
    assert engine.stats().device_idle_share is None


def test_metrics_have_what_was_measured():
    one = stats_of(device_busy=3.0, device_idle=1.0)
    assert total([one, one]).device_idle == 2 and one.device_idle_share == 0.25
    text, labels = metrics_of(one), '{engine="0",model_name="m"}'
    assert f"atomc:device_busy_seconds_total{labels} 3.0" in text
    assert f"atomc:device_idle_seconds_total{labels} 1.0" in text
