"""Triton kernels compiled in parallel, before a step needs them."""

import functools
import itertools
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import triton
from torch._inductor.runtime import compile_tasks

from atomc import kernels, ops
from atomc.kernels.triton.launch import parallel_compile
from atomc.kernels.triton.launch.parallel_compile import compile_in_parallel, start_triton
from atomc.torch_compat import inductor

assert kernels.load("triton") is None

ROOT = Path(__file__).parents[2]


def test_the_interpreter_has_nothing_to_compile_and_nothing_runs():
    if torch.cuda.is_available():
        pytest.skip("kernels are compiled here")
    called = []
    assert not compile_in_parallel(lambda: called.append(1))
    assert not called


def test_tritons_files_are_hashed_in_a_thread_before_kernels_are_compiled(monkeypatch):
    """Once a process; whatever goes wrong there is raised by a launch."""
    events = []

    def hash_files():
        time.sleep(0.05)
        events.append(threading.current_thread() is threading.main_thread())
        raise OSError

    start_once = functools.cache(start_triton.__wrapped__)
    monkeypatch.setattr(parallel_compile, "start_triton", start_once)
    monkeypatch.setattr(parallel_compile, "triton_key", hash_files)
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    driver = SimpleNamespace(get_current_device=lambda: events.append("device"))
    monkeypatch.setattr(triton.runtime, "driver", SimpleNamespace(active=driver))
    kernels.start_triton()
    kernels.start_triton()
    compile_in_parallel(lambda: events.append("launch"))
    assert events == [False, "device", "launch"]


# Triton compiles for a GPU that is not there. Of its driver, what launches: it writes down the
# thread and the device.
DRIVER = """
import os
import sys
import threading
import time
from types import SimpleNamespace

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget

loaded, compiled, here, launched = [], [], threading.local(), []
here.device = 3


def load_binary(name, *rest):
    loaded.append((name, here.device, threading.current_thread() is threading.main_thread()))
    return "module", "function", 32, 0, 1024


triton.runtime.driver.set_active(SimpleNamespace(
    get_current_device=lambda: here.device, set_current_device=lambda number: setattr(here, "device", number),
    get_current_stream=lambda device: 0, get_current_target=lambda: GPUTarget("cuda", 90, 32),
    launcher_cls=lambda source, metadata: lambda *args: launched.append(args),
    utils=SimpleNamespace(load_binary=load_binary, get_device_properties=lambda device: {"max_shared_mem": 2**18}),
))
triton.knobs.compilation.listener = lambda *, src, cache_hit, **_: compiled.append((src.name, cache_hit))
"""
KERNELS = """
from atomc.kernels.triton.launch.compile_worker import start_worker
from atomc.kernels.triton.launch.launch import Rows
from atomc.kernels.triton.rows.norm import _rms_norm
from atomc.kernels.triton.launch.parallel_compile import compile_in_parallel, compiling


@triton.jit
def broken(x_ptr, SIZE: tl.constexpr):
    tl.store(x_ptr, SIZE.nothing)


class Pointer:
    dtype = "bf16"
    data_ptr = staticmethod(lambda: 0)


def launches(columns=(64, 128)):
    for D in columns:
        x = Rows(Pointer(), 0, 0, D)
        _rms_norm[(3,)](x, None, x, None, Pointer(), 3, (1, 1), 1e-6, D=D, WIDTH=D, STYLE="after",
                        BLOCK=D, ROWS=4, num_warps=4, PDL=False)


def everything():
    for _ in range(3):
        launches()
    broken[(1,)](Pointer(), SIZE=1)
"""
ONCE = """
worker, kind = None, sys.argv[1]
if kind != "alone":
    os.cpu_count = lambda: 8
    worker = start_worker("a start")
    with worker.submitting(only=True):
        launches()
    assert not compiled and not loaded
if kind == "killed":
    worker._process.kill()
while kind in ("helped", "killed") and not worker.ready:
    time.sleep(0.02)
assert compile_in_parallel(everything, worker=worker)
if worker:
    assert worker._process.poll() is not None, "it is still running"
    assert worker.marker.exists() == (kind == "helped")
if kind == "helped":
    assert start_worker("a start") is None, "its kernels are there"
assert compiled == 2 * [("_rms_norm", kind == "helped")], compiled
assert loaded == 2 * [("_rms_norm", 3, False)], loaded
assert not launched
launches()
assert len(compiled) == len(loaded) == len(launched) == 2, "a launch compiles or loads once more"
try:
    broken[(1,)](Pointer(), SIZE=1)
except triton.CompilationError:
    print("told")
"""


OTHER_THREAD = """
def other():
    here.device = 5
    launches()


def launch_here_and_elsewhere():
    launches()
    thread = threading.Thread(target=other)
    thread.start()
    thread.join()


with compiling(launch_here_and_elsewhere):
    assert len(launched) == 2, "those of another thread, which run"
    launches()
    assert len(launched) == 4, "after what is compiled only"
print("told")
"""

# A model for a GPU, with its tensors on the CPU: ops of PyTorch run, Triton's kernels do not.
FIRST_CALL = """
from dataclasses import replace

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from atomc.backend import compile_graph
from atomc.options import Options
from atomc.platform import Platform

sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 99}
sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
config = AutoConfig.for_model("qwen3", **sizes)
model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
before = []


def backend(graph, inputs):
    options = Options(glue="eager", strict=True, cache=False)
    function = compile_graph(graph, inputs, options, Platform.named("h200"))
    before.extend(compiled)
    assert not launched
    return function


with torch.no_grad():
    call = torch.compile(model, backend=backend, dynamic=sys.argv[1] == "dynamic")
    for _ in range(2):
        call(torch.arange(7)[None], use_cache=False)
assert {"_rms_norm", "_rope", "_tensor_core_product"} <= {name for name, _ in before}
assert compiled == before, "a call compiles what was not compiled before"
assert len(launched) > len(loaded) == len(compiled)
assert not any(is_main for _, _, is_main in loaded)
print("told")
"""


def _says(script: str, kind: str, folder: Path) -> str:
    file = folder / "elsewhere.py"  # Triton reads the source of kernels
    file.write_text(script)
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(folder),
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(
        [sys.executable, file, kind], env=environment, capture_output=True, text=True
    )
    return done.stdout or done.stderr


@pytest.mark.covering
@pytest.mark.parametrize("kind", ["alone", "helped", "killed", "late"])
def test_each_kernel_is_compiled_and_loaded_once_in_a_thread_and_does_not_run(kind, tmp_path):
    assert _says(DRIVER + KERNELS + ONCE, kind, tmp_path) == "told\n"


def test_kernels_that_another_thread_launches_meanwhile_run(tmp_path):
    assert _says(DRIVER + KERNELS + OTHER_THREAD, "", tmp_path) == "told\n"


@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_the_first_call_of_a_graph_compiles_no_kernel(kind, tmp_path):
    assert _says(DRIVER + FIRST_CALL, kind, tmp_path) == "told\n"


SETS = """
import functools, os
from triton import knobs
from torch._inductor.runtime import compile_tasks
seen = {name: os.environ.get(name) for name in %r}
os.environ.setdefault("TRITON_CACHE_DIR", "its folder")
compile_tasks._set_triton_ptxas_path()
if "TRITON_LIBDEVICE_PATH" not in os.environ:
    knobs.nvidia.libdevice_path = "its libdevice"
def call(args):
    return seen
"""


def test_settings_of_triton_that_inductor_makes_hold_for_its_own_kernels_only(monkeypatch):
    """With another ptxas or another folder, our kernels would not be found in Triton's cache."""
    names = ("TRITON_PTXAS_PATH", "TRITON_CACHE_DIR", "TRITON_LIBDEVICE_PATH")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setitem(vars(triton.knobs.nvidia), "libdevice_path", None)
    del triton.knobs.nvidia.libdevice_path
    its = functools.cache(lambda: os.environ.setdefault("TRITON_PTXAS_PATH", "its ptxas"))
    monkeypatch.setattr(compile_tasks, "_set_triton_ptxas_path", its)

    def settings():
        """Of Triton, while and after code of Inductor is loaded."""
        code = inductor.InductorCode(SETS % (names,) + f"# {next(numbers)}", {}, [], [])
        before = inductor.from_code(code, True, {})()
        now = [os.environ.get(name) for name in names]
        return list(before.values()), now, triton.knobs.nvidia.libdevice_path

    numbers = itertools.count()
    assert settings() == settings() == ([None] * 3, [None] * 3, None)
    assert its.cache_info().currsize == 0, "Inductor sets it at its next kernel"
    mine = [f"my {name}" for name in names]
    for name, value in zip(names, mine, strict=True):
        monkeypatch.setenv(name, value)
    assert settings() == (mine, mine, "my TRITON_LIBDEVICE_PATH")


@pytest.mark.gpu
def test_kernels_are_compiled_and_do_not_run():
    x, weight = torch.randn(3, 777, device="cuda"), torch.rand(777, device="cuda")
    (kernel,) = (kernel.function for kernel in ops.rms_norm.kernels if kernel.provider == "triton")
    out = []
    assert compile_in_parallel(lambda: out.extend(kernel(x, weight, 1e-6) for _ in range(2)))
    expected = ops.rms_norm.reference(x, weight, 1e-6)
    assert not torch.equal(out[0], expected)
    torch.testing.assert_close(kernel(x, weight, 1e-6), expected)
