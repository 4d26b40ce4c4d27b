"""What every test runs under: strict, one thread a worker, Triton in its interpreter where there is
no GPU.
"""

import dataclasses
import importlib.util
import logging
import os
import random
import shutil
import sys
import zlib
from pathlib import Path

from gpus import gpu_of_worker

# Read when torch, Triton and atomc are imported, so set before any of them is.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("ATOMC_STRICT", "1")
os.environ.setdefault("ATOMC_CACHE", "0")  # every test compiles; those of the cache say so
os.environ.update(gpu_of_worker())

import pytest
import shared_objects
import torch
from covering import cases_left_out, rotating_left_out
from serving import COMPILED, KEY, serving

from atomc import kernels

# Tests use what the tests of other rooms define. Rooms themselves are no packages: tests/kernels is
# not the library `kernels` that transformers looks for, nor bench/kernels.py.
TESTS = Path(__file__).parent
sys.path += sorted({str(path.parent) for path in TESTS.glob("*/**/test_*.py")})
sys.path.remove(str(TESTS))

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")
torch.set_num_threads(1)
# pytest keeps each line of a logger that does not propagate: of torch's structured trace every graph
# of every compilation, which is written only where something reads it. So this one propagates, to a
# logger without handlers.
TRACE = logging.getLogger("torch.__trace")
TRACE.propagate, TRACE.parent = True, logging.Logger("unread")
if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton"):
    from interpreted_floats import round_to_nearest
    from interpreted_launches import patch_once_a_launch
    from memory import check_bounds

    round_to_nearest()
    check_bounds()
    patch_once_a_launch()

# Modules register their kernels when they are imported, once. Imported by a test that adds a kernel
# and then puts back the list of before, they would be missing in every later test.
for provider in (*kernels.PROVIDERS, kernels.INVARIANT):
    kernels.load(provider)


def pytest_addoption(parser):
    parser.addoption(
        "--grid-seed",
        type=int,
        help="draws the cases of kernel_grid.py, and the cases and tests of covering.py, that run",
    )
    parser.addoption(
        "--rotation",
        type=int,
        default=10,
        help="tests marked rotating run at one change in so many, drawn by --grid-seed; 1 runs all",
    )
    parser.addoption(
        "--third",
        type=int,
        choices=range(3),
        help="runs the tests of one third only, the same at each run: make test-newest, test-oldest",
    )


def pytest_configure(config):
    given = getattr(config, "workerinput", {}).get("grid_seed", config.option.grid_seed)
    config.option.grid_seed = random.randrange(10**6) if given is None else given


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    """All workers of pytest-xdist draw the same."""
    node.workerinput["grid_seed"] = node.config.option.grid_seed


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    if config.getvalue("dist") != "loadgroup":
        return None
    from group_scheduling import GroupScheduling

    return GroupScheduling(config, log)


def pytest_report_header(config):
    return f"drawn cases: --grid-seed {config.option.grid_seed}"


@pytest.hookimpl(tryfirst=True)  # before those marked slow are left out
def pytest_collection_modifyitems(config, items):
    option = config.option
    left_out = cases_left_out(items, option.grid_seed)
    for item in left_out + rotating_left_out(items, option.grid_seed, option.rotation):
        item.add_marker(pytest.mark.slow)
    third = config.option.third
    if third is not None:  # of each file, so that no subject is left out
        left_out = [item for item in items if zlib.crc32(item.nodeid.encode()) % 3 != third]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if zlib.crc32(item.nodeid.encode()) % 3 == third]
    if HAS_GPU:
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="torch sees no CUDA or ROCm device"))


def pytest_collection_finish():
    shared_objects.hide()
    shared_objects.collect_seldom()


def pytest_runtest_teardown():
    shared_objects.hide()


def seed():
    if HAS_GPU:
        torch.manual_seed(0)
    else:  # without the traceback that it formats for each kind of device that is not here
        torch.default_generator.manual_seed(0)


def pytest_collectstart(collector):
    seed()  # for the tensors that a module makes when it is imported


@pytest.fixture(autouse=True)
def same_random_numbers_in_any_order():
    seed()


@pytest.fixture(autouse=True)
def forget_what_dynamo_compiled():
    yield
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
        # torch 2.11 sets both for the time of a call with dynamic=False; two threads in such calls
        # leave what the other one has set.
        torch._dynamo.config.automatic_dynamic_shapes = True
        torch._dynamo.config.assume_static_by_default = True


@pytest.fixture
def repeated(monkeypatch):
    """The repeated callables of the graphs that a test compiles."""
    from atomc.compiler import callable_of
    from atomc.replay.repeated import Repeated

    callables = []

    class Noted(Repeated):
        def __init__(self, *args):
            super().__init__(*args)
            callables.append(self)

    monkeypatch.setattr(callable_of, "Repeated", Noted)
    return callables


@pytest.fixture
def pretended_gpu(monkeypatch):
    """Triton's kernels are chosen, as on an H200, for tensors on the CPU."""
    from atomc.platform import Platform

    platform = dataclasses.replace(Platform.named("h200"), device="cpu", here=True)
    monkeypatch.setattr(Platform, "detect", staticmethod(lambda device=None: platform))


@pytest.fixture(scope="module")
def compiled_once():
    """Programs that another test of this run compiled are loaded: for tests of what runs them."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("ATOMC_CACHE", "1")
        environment.setenv("ATOMC_CACHE_DIR", COMPILED)
        yield


@pytest.fixture(scope="module")
def browser():
    """A headless Chromium."""
    playwright = pytest.importorskip("playwright.sync_api")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("there is no Chromium on the path")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def api_server(tmp_path_factory):
    """A server of the demo model for several files, whose tests are in the xdist group "server"."""
    profiles = tmp_path_factory.mktemp("profiles")
    flags = {
        "--max-body-bytes": 200_000,
        "--max-logprobs": 5,
        "--profile-dir": profiles,
        "--allow-origin": "https://page.example",
        "--tool-call-parser": "hermes",
        "--reasoning-parser": "think",
        "--options": "layout=paged",
    }
    given = [part for flag in flags.items() for part in flag]
    with serving("--api-key", KEY, "--api-key", "second-key", *given) as found:
        found.profiles = profiles
        yield found
