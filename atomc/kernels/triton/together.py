"""Triton kernels compiled many at once, before they are needed: one after the other, 40 of them
take 9 s.
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import patch

import triton

from atomc.kernels.triton.forked import Helper


class _Loading(triton.AsyncCompileMode):  # type: ignore[misc]
    """Compiles in threads and loads there, too: what launches a kernel is built by a C compiler.

    A kernel is handed over once: launches that follow find that it is coming.
    """

    def submit(self, key: Any, compile: Callable[[], Any], remember: Callable[[Any], None]) -> Any:
        def loaded() -> Any:
            kernel = compile()
            kernel.run  # noqa: B018  reading it loads the kernel
            return kernel

        coming = super().submit(key, loaded, remember)
        remember(coming)
        return coming


def compile_together(
    launches: Callable[[], object], *, threads: int = 16, helper: Helper | None = None
) -> bool:
    """Call `launches`, compiling and loading the kernels that it launches instead of running them.

    Returns whether that was possible. What kernels would have written is not there: launches must
    not decide by it. A kernel that does not compile says so where it is launched next. helper: a
    process that compiles before the threads do.
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
        _Loading(pool, ignore_errors=True),
        patch.object(triton.JITFunction, "run", compiled_only),
    ):
        try:
            if helper is None:
                compiled.set()
                launches()
            else:
                with helper.told():
                    launches()
                helper.finish()
        finally:
            compiled.set()
    return True
