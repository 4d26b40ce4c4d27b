"""Compile Triton kernels in processes. Half of the work is Python code, for which threads share one
interpreter lock.

`python -m atomc.kernels.triton.launch.compile_worker` is the worker. It imports the compiler while
its parent traces a model, reads one line per kernel, forks a process that compiles it, and exits at
the end of its input. It uses no threads and no GPU, because it forks. The kernels go to Triton's
cache, where the parent finds them; the parent compiles kernels that are missing there.
"""

import contextlib
import hashlib
import importlib
import json
import operator
import os
import pickle
import select
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import astuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import triton
from triton.backends import backends
from triton.backends.compiler import GPUTarget
from triton.runtime.cache import triton_key

TIMEOUT = 60  # seconds for the worker to finish after the last kernel was submitted
MIN_CORES = 4


class CompileWorker:
    """The worker process; it ends with this one.

    marker  a file whose existence says that Triton's cache has the kernels of an earlier start with
            the same key
    """

    def __init__(self, marker: Path) -> None:
        self.marker = marker
        self._sent: set[str] = set()
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "OMP_NUM_THREADS": "1",
            "TRITON_CACHE_DIR": triton.knobs.cache.dir,
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            env=environment,
            text=True,
            pipesize=2**20,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )

    @contextlib.contextmanager
    def submitting(self, *, only: bool = False) -> Iterator[None]:
        """Submit the kernels launched in this context to the worker.

        only: this process neither compiles nor launches them.
        """

        def hook(*, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
            target = astuple(triton.runtime.driver.active.get_current_target())
            constants = {k: v for k, v in compile["constants"].items() if isinstance(v, tuple)}
            tuples = pickle.dumps((compile["signature"], constants)).hex()
            data = compile["specialization_data"]
            self._send(json.dumps([fn.module, fn.name, target, data, tuples]))
            return only

        with patch.object(triton.knobs.runtime, "jit_cache_hook", hook):
            yield

    def _send(self, line: str) -> None:
        if line not in self._sent:
            self._sent.add(line)
            with contextlib.suppress(OSError):  # the worker has ended
                print(line, file=self._process.stdin, flush=True)

    @property
    def ready(self) -> bool:
        """Whether the worker has imported the compiler, or ended."""
        stdout = self._process.stdout
        return stdout is not None and bool(select.select([stdout], [], [], 0.0)[0])

    def finish(self) -> None:
        """Drain the worker; if it has not started, end it and leave compiling to the threads."""
        if self.ready:
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                self._process.communicate(timeout=TIMEOUT)
                if self._process.returncode == 0:
                    self.marker.touch()
        self.end()

    def end(self) -> None:
        self._process.kill()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):  # of an unread line
                    stream.close()
        self._process.wait()


def start_worker(key: str) -> CompileWorker | None:
    """A new worker; None if there are few cores, or if Triton's cache has the kernels of an earlier
    start with this key.
    """
    if (
        (os.cpu_count() or 1) < MIN_CORES
        or triton.knobs.runtime.interpret
        or triton.knobs.runtime.jit_cache_hook
    ):
        return None
    marker = marker_file(key)
    return None if marker.exists() else CompileWorker(marker)


def marker_file(key: str) -> Path:
    """A file in Triton's cache that says that it has the kernels of something with this key."""
    versioned = f"{key} {triton.__version__} {torch.__version__}"
    return Path(triton.knobs.cache.dir, f"atomc-{hashlib.sha256(versioned.encode()).hexdigest()}")


def main() -> None:
    driver = _driver()
    triton.runtime.driver.set_active(driver)
    # Part of each kernel's name: a hash of Triton's own files. Cached here for all forks.
    triton_key()
    print("ready", flush=True)
    for number, line in enumerate(sys.stdin):
        if number >= (os.cpu_count() or 1):
            os.wait()
        if os.fork() == 0:
            try:
                _compile(driver, *json.loads(line))
            finally:
                os._exit(0)
    with contextlib.suppress(ChildProcessError):  # no child is left
        while True:
            os.wait()


def _driver() -> Any:
    """The driver, to build launchers without a GPU; one that builds none if it cannot be loaded."""
    try:
        return backends["amd" if torch.version.hip else "nvidia"].driver()
    except Exception:  # vendors' libraries raise exceptions of many types
        return SimpleNamespace(launcher_cls=lambda source, metadata: None)


def _compile(
    driver: Any, module: str, name: str, target: list[str | int], specialization: str, tuples: str
) -> None:
    driver.get_current_device = lambda: 0
    driver.get_current_target = lambda: GPUTarget(*target)
    function = operator.attrgetter(name)(importlib.import_module(module))
    compile = function._do_compile
    # JSON makes lists of NamedTuples, whose names the kernel reads.
    signature, named = pickle.loads(bytes.fromhex(tuples))

    def compiled(
        key: str, _: object, device: int, constants: dict[Any, Any], *rest: Any, **kwargs: Any
    ) -> Any:
        return compile(key, signature, device, constants | named, *rest, **kwargs)

    function._do_compile = compiled
    kernel = function.preload(specialization)
    driver.launcher_cls(kernel.src, kernel.metadata)


if __name__ == "__main__":
    main()
