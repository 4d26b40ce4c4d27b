"""Triton kernels compiled in processes: threads of one would wait for each other, for half of the
work is in Python.

`python -m atomc.kernels.triton.forked` is the helper. It imports what compiling needs while whoever
started it traces a model, reads a line for each kernel, forks a process that compiles it, and ends
with its input. It has no threads and no GPU, which a fork would break. The kernels are in Triton's
cache then, where they are looked up; what is not is compiled.
"""

import contextlib
import hashlib
import importlib
import json
import operator
import os
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

SECONDS = 60  # that the helper may take once it knows all kernels
FEWEST_CORES = 4


class Helper:
    """The helper process, which ends with this one.

    left  a file that says: kernels of a start like this one were left in Triton's cache
    """

    def __init__(self, left: Path) -> None:
        self.left = left
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
    def told(self, *, only: bool = False) -> Iterator[None]:
        """The helper compiles what is launched inside. only: nobody else does, and it is not
        launched.
        """

        def hook(*, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
            target = astuple(triton.runtime.driver.active.get_current_target())
            self._send(json.dumps([fn.module, fn.name, target, compile["specialization_data"]]))
            return only

        with patch.object(triton.knobs.runtime, "jit_cache_hook", hook):
            yield

    def _send(self, line: str) -> None:
        if line not in self._sent:
            self._sent.add(line)
            with contextlib.suppress(OSError):  # it has ended
                print(line, file=self._process.stdin, flush=True)

    @property
    def ready(self) -> bool:
        """It has imported what it needs, or failed to."""
        told = self._process.stdout
        return told is not None and bool(select.select([told], [], [], 0.0)[0])

    def finish(self) -> None:
        """Wait until all is compiled that it was told. A helper that is not ready yet is not waited
        for: threads are.
        """
        if self.ready:
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                self._process.communicate(timeout=SECONDS)
                if self._process.returncode == 0:
                    self.left.touch()
        self.end()

    def end(self) -> None:
        self._process.kill()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):  # a line that nobody read
                    stream.close()
        self._process.wait()


def helper_for(start: str) -> Helper | None:
    """A helper, unless an earlier start with this description has left its kernels in Triton's
    cache, or cores are few.
    """
    if (
        (os.cpu_count() or 1) < FEWEST_CORES
        or triton.knobs.runtime.interpret
        or triton.knobs.runtime.jit_cache_hook
    ):
        return None
    what = f"{start} {triton.__version__} {torch.__version__}"
    left = Path(triton.knobs.cache.dir, f"atomc-{hashlib.sha256(what.encode()).hexdigest()}")
    return None if left.exists() else Helper(left)


def main() -> None:
    driver = _driver()
    triton.runtime.driver.set_active(driver)
    # a part of the name of each kernel, for which Triton reads itself: once, and not in each
    # process
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
    with contextlib.suppress(ChildProcessError):  # there is none left
        while True:
            os.wait()


def _driver() -> Any:
    """What builds launchers, without the GPU. There may be none to build them for."""
    try:
        return backends["amd" if torch.version.hip else "nvidia"].driver()
    except Exception:  # a vendor's library fails in its own ways
        return SimpleNamespace(launcher_cls=lambda source, metadata: None)


def _compile(driver: Any, module: str, name: str, target: list[Any], specialization: str) -> None:
    driver.get_current_device = lambda: 0
    driver.get_current_target = lambda: GPUTarget(*target)
    kernel = operator.attrgetter(name)(importlib.import_module(module)).preload(specialization)
    driver.launcher_cls(kernel.src, kernel.metadata)


if __name__ == "__main__":
    main()
