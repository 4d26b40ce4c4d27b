"""Compile Triton kernels in parallel before they are needed; one after the other, 40 take 9 s."""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import patch

import triton
from torch.utils._pytree import tree_map
from triton.runtime.cache import triton_key
from triton.runtime.jit import MockTensor

from atomc.files.atomic_file import write_atomically
from atomc.kernels.triton.launch.compile_worker import CompileWorker, marker_file
from atomc.torch_compat.core import FakeTensor


class KernelList:
    """The kernels that some launches need, as a file in Triton's cache with their folders there.

    key  names the launches and what decides which kernels they need; Triton's version is added
    """

    def __init__(self, key: str) -> None:
        self.file = marker_file(key)

    def is_cached(self) -> bool:
        """Whether the list was written, and Triton's cache has all its kernels."""
        try:
            names = self.file.read_text().split()
        except OSError:
            return False
        return all((self.file.parent / name).is_dir() for name in names)

    def write(self, names: Iterable[str]) -> None:
        """Write the names of the kernels' folders, if the cache can be written."""
        with contextlib.suppress(OSError):
            write_atomically(self.file, "\n".join(sorted(names)).encode())


class _CompileAndLoad(triton.AsyncCompileMode):  # type: ignore[misc]
    """Compile and load kernels in threads. Loading is slow too: a C compiler builds the launcher.

    A kernel is submitted once; later launches find its future in Triton's cache.

    folders  of the kernels in Triton's cache, by name
    """

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        super().__init__(pool, ignore_errors=True)
        self.folders: set[str] = set()

    def submit(self, key: Any, compile: Callable[[], Any], *callbacks: Callable[..., None]) -> Any:
        def loaded() -> Any:
            kernel = compile()
            kernel.run  # noqa: B018  reading it loads the kernel
            self.folders.update(Path(file).parent.name for file in kernel.metadata_group.values())
            return kernel

        future = super().submit(key, loaded, *callbacks)
        remember = callbacks[0]  # Triton 3.9 has a second, for a failure
        remember(future)
        return future


_patching = threading.Lock()


@functools.cache
def start_triton() -> threading.Thread:
    """Begin what Triton does once a process, in a thread: it hashes its own files, 460 MB, and
    builds its driver with a C compiler, which takes 2 s, mostly without the interpreter's lock.
    """
    thread = threading.Thread(target=_start_triton, daemon=True)
    thread.start()
    return thread


def _start_triton() -> None:
    with contextlib.suppress(Exception):  # raised again, with its reason, by a launch
        triton_key()
        triton.runtime.driver.active.get_current_device()


def _without_memory(x: Any) -> Any:
    return MockTensor(x.dtype) if isinstance(x, FakeTensor) else x


def compile_in_parallel(
    launches: Callable[[], object], *, threads: int = 16, worker: CompileWorker | None = None
) -> set[str] | None:
    """As `compiling`. Returns the names of the kernels' folders in Triton's cache, or None."""
    with compiling(launches, threads=threads, worker=worker) as folders:
        pass
    return folders


@contextlib.contextmanager
def compiling(
    launches: Callable[[], object], *, threads: int = 16, worker: CompileWorker | None = None
) -> Iterator[set[str] | None]:
    """Call `launches`, and compile and load the kernels that it launches, instead of running them,
    until this context ends. Yields the names of their folders in Triton's cache, complete then.

    Yields None, without calling it, in Triton's interpreter. No kernel writes its results, so the
    control flow of `launches` must not depend on them. It may launch with fake tensors, which stand
    for aligned ones. A kernel that fails to compile raises at its next launch. worker: a process
    that compiles the kernels before the threads load them.
    """
    if triton.knobs.runtime.interpret:
        yield None
        return
    start_triton().join()
    run, driver = triton.JITFunction.run, triton.runtime.driver.active
    device, compiled = driver.get_current_device(), threading.Event()
    thread = threading.get_ident()

    def compiled_only(kernel: Any, *args: Any, warmup: bool, **kwargs: Any) -> Any:
        if threading.get_ident() == thread:
            args, kwargs = tree_map(_without_memory, (args, kwargs))
            warmup = True
        return run(kernel, *args, warmup=warmup, **kwargs)

    def begin() -> None:
        compiled.wait()
        driver.set_current_device(device)

    pool = ThreadPoolExecutor(threads, initializer=begin)
    mode = _CompileAndLoad(pool)
    with pool, mode:
        try:
            if worker is None:
                compiled.set()
            submitting = contextlib.nullcontext() if worker is None else worker.submitting()
            with _patching, patch.object(triton.JITFunction, "run", compiled_only), submitting:
                launches()
            if worker is not None:
                worker.finish()
                compiled.set()
            yield mode.folders
        finally:
            compiled.set()
