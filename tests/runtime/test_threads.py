"""How many threads compute on a CPU, and who says so."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from atomc import LLM
from atomc.runtime.config import EngineConfig
from atomc.runtime.execution import threads
from atomc.runtime.execution.threads import Threads, choose

ROOT = Path(__file__).parents[2]


@pytest.fixture
def cores(monkeypatch):
    """A machine of so many cores, of which nobody has said anything."""

    def of(count, torch_has=1000):
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        monkeypatch.setattr(threads, "usable_cores", lambda: count)
        monkeypatch.setattr(torch, "get_num_threads", lambda: torch_has)

    return of


@pytest.mark.parametrize(
    ("count", "alone", "serving"), [(1, 1, 1), (2, 2, 2), (3, 3, 2), (16, 16, 15)]
)
def test_each_core_gets_a_thread_and_a_server_keeps_one_core_of_more_than_two(
    cores, count, alone, serving
):
    cores(count)
    assert (choose(None).count, choose(None, spare=1).count) == (alone, serving)


def test_the_choice_is_said_with_what_changes_it(cores):
    cores(2)
    assert str(choose(None)) == (
        "2 threads: physical cores that this process may use; threads changes it, and 1 suits a "
        "machine that others use too"
    )
    cores(1)
    assert (
        str(choose(None))
        == "1 thread: physical cores that this process may use; threads changes it"
    )


def test_what_was_asked_for_comes_before_the_environment_and_that_before_the_cores(
    cores, monkeypatch
):
    cores(8)
    monkeypatch.setenv("OMP_NUM_THREADS", "5,2")
    assert choose(3) == Threads(3, "as threads says")
    assert choose(None) == Threads(5, "as OMP_NUM_THREADS says; threads changes it")
    monkeypatch.setenv("OMP_NUM_THREADS", "many")
    assert choose(None).count == 8


def test_fewer_threads_that_torch_was_given_stay(cores):
    cores(8, torch_has=4)
    assert choose(None) == Threads(4, "as torch is set; threads changes it")


def test_an_engine_on_a_cpu_computes_with_the_threads_that_it_was_given():
    before = torch.get_num_threads()
    try:
        llm = LLM(
            device="cpu", threads=2, kv_bytes=2**24, options={"glue": "eager"}, progress=False
        )
        assert torch.get_num_threads() == 2
        assert "2 threads: as threads says" in llm.program.report.notes
    finally:
        torch.set_num_threads(before)


def test_no_threads_are_refused():
    with pytest.raises(ValueError, match="threads is 0, it must be at least 1"):
        EngineConfig(threads=0)


def policy_of(environment):
    """OMP_WAIT_POLICY after the commands of atomc have set it up, in a process with this
    environment.
    """
    code = (
        "import os, sys; from atomc.cli import let_openmp_sleep; let_openmp_sleep(); "
        "print(os.environ.get('OMP_WAIT_POLICY'), 'torch' in sys.modules)"
    )
    found = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("OMP_WAIT", "GOMP_", "KMP_"))
    }
    return subprocess.run(
        [sys.executable, "-c", code],
        env=found | {"PYTHONPATH": str(ROOT)} | environment,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()


@pytest.mark.parametrize(
    ("environment", "policy"),
    [
        ({}, "passive"),
        ({"OMP_WAIT_POLICY": "active"}, "active"),
        ({"GOMP_SPINCOUNT": "100"}, "None"),
    ],
)
def test_threads_sleep_while_they_wait_unless_the_user_decided_and_that_is_set_before_torch_is_there(
    environment, policy
):
    assert policy_of(environment) == [policy, "False"]


def test_the_engines_process_decides_how_threads_wait_before_torch_is_there():
    code = "import sys, atomc.runtime.server.engines.engine_process; print('torch' in sys.modules)"
    found = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.strip() == "False"
