"""Which compiled graphs repeat the launches of earlier calls."""

import pytest

from atomc.options import Options
from atomc.platform import Platform
from atomc.replay.repeatable import repeats_calls, repeats_steps
from atomc.report.records import INLINE, KernelChoice
from atomc.report.report import Report


def report(*providers: str, op: str = "linear") -> Report:
    kernels = [KernelChoice(op, "model", "any", name) for name in providers]
    return Report("model", kernels=kernels)


@pytest.mark.parametrize(
    ("platform", "providers", "options", "expected"),
    [
        ("h200", ["triton", "cuda", "torch", INLINE], {}, True),
        ("h200", ["triton", "fla"], {}, False),
        ("h200", ["triton", "a user's"], {}, False),
        ("h200", ["triton"], {"repeat": False}, False),
        ("h200", ["triton"], {"audit": True}, False),
        ("h200", ["triton"], {"inductor": {"cpp_wrapper": True}}, False),
        ("gfx950", ["triton", "torch"], {}, False),
        ("cpu-zen4", ["onednn", "zentorch", "torch"], {}, True),
        ("cpu-zen4", ["onednn", "fla"], {}, False),
    ],
)
def test_only_graphs_whose_launches_are_all_seen(platform, providers, options, expected):
    platform = Platform.named(platform)
    assert repeats_calls(Options(**options), platform, report(*providers), []) is expected


def test_on_a_cpu_no_recording_shows_what_the_host_reads():
    for platform, expected in (("h200", True), ("cpu-zen4", False)):
        arguments = Options(), Platform.named(platform), report("torch"), ["moe_experts"]
        assert repeats_calls(*arguments) is expected


@pytest.mark.parametrize(
    ("platform", "op", "syncing", "expected"),
    [
        ("h200", "linear", [], True),
        ("h200", "all_reduce", [], False),
        ("h200", "linear", ["moe_experts"], False),
        ("cpu-zen4", "linear", [], False),
        ("gfx950", "linear", [], False),
    ],
)
def test_steps_are_repeated_on_one_gpu(platform, op, syncing, expected):
    arguments = Options(), Platform.named(platform), report("triton", op=op), syncing
    assert repeats_steps(*arguments) is expected
    without = Options(repeat=False), *arguments[1:]
    assert not repeats_steps(*without)
