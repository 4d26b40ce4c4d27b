"""Compile Triton kernels in parallel before they are needed; one after the other, 40 take 9 s."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import patch

import triton

from atomc.kernels.triton.launch.compile_worker import CompileWorker


class _CompileAndLoad(triton.AsyncCompileMode):  # type: ignore[misc]
    """Compile and load kernels in threads. Loading is slow too: a C compiler builds the launcher.

    A kernel is submitted once; later launches find its future in Triton's cache.
    """

    def submit(self, key: Any, compile: Callable[[], Any], *callbacks: Callable[..., None]) -> Any:
        def loaded() -> Any:
            kernel = compile()
            kernel.run  # noqa: B018  reading it loads the kernel
            return kernel

        future = super().submit(key, loaded, *callbacks)
        remember = callbacks[0]  # Triton 3.9 has a second, for a failure
        remember(future)
        return future


def compile_in_parallel(
    launches: Callable[[], object], *, threads: int = 16, worker: CompileWorker | None = None
) -> bool:
    """Call `launches`, and compile and load the kernels that it launches instead of running them.

    Returns False, without calling it, in Triton's interpreter. No kernel writes its results, so the
    control flow of `launches` must not depend on them. A kernel that fails to compile raises at its
    next launch. worker: a process that compiles the kernels before the threads load them.
    """
    if triton.knobs.runtime.interpret:
        return False
    run, driver = triton.JITFunction.run, triton.runtime.driver.active
    device, compiled = driver.get_current_device(), threading.Event()

    def compiled_only(kernel: Any, *args: Any, warmup: bool, **kwargs: Any) -> Any:
        return run(kernel, *args, warmup=True, **kwargs)

    def begin() -> None:
        compiled.wait()
        driver.set_current_device(device)

    pool = ThreadPoolExecutor(threads, initializer=begin)
    with (
        pool,
        _CompileAndLoad(pool, ignore_errors=True),
        patch.object(triton.JITFunction, "run", compiled_only),
    ):
        try:
            if worker is None:
                compiled.set()
                launches()
            else:
                with worker.submitting():
                    launches()
                worker.finish()
        finally:
            compiled.set()
    return True
