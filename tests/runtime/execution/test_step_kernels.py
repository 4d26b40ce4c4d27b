"""What a start prepares for the kernels of its steps."""

import threading
import time
from types import SimpleNamespace

import pytest

pytest.importorskip("triton")

from atomc.kernels.triton.launch import compile_worker, parallel_compile
from atomc.runtime.config import EngineConfig
from atomc.runtime.execution.step_kernels import StepKernels


def test_tritons_files_are_hashed_in_a_thread_before_kernels_are_loaded(monkeypatch):
    events = []

    def hash_files():
        time.sleep(0.05)
        events.append(threading.current_thread() is threading.main_thread())

    monkeypatch.setattr(compile_worker, "triton_key", hash_files)
    monkeypatch.setattr(
        parallel_compile, "compile_in_parallel", lambda *_, **__: events.append("load")
    )
    step_kernels = StepKernels(EngineConfig(model="a model"))
    step_kernels.hash_triton()
    program = SimpleNamespace(device=SimpleNamespace(type="cuda"), syncing=())
    step_kernels.load(SimpleNamespace(program=program), None, 1)
    assert events == [False, "load"]
