"""Triton kernels compiled many at once, before they are needed: one after the other, 40 of them take 9 s."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import patch

import triton


def compile_together(launches: Callable[[], object], *, threads: int = 16) -> bool:
    """Call `launches`, compiling the kernels that it launches instead of running them. Returns whether that was possible.

    What kernels would have written is not there: launches must not decide by it. A kernel that does not compile says so
    where it is launched next.
    """
    mode = getattr(triton, "AsyncCompileMode", None)  # since 3.4
    if mode is None or not hasattr(triton, "JITFunction") or triton.knobs.runtime.interpret:
        return False
    run = triton.JITFunction.run

    def compiled_only(kernel: Any, *args: Any, warmup: bool, **kwargs: Any) -> Any:
        return run(kernel, *args, warmup=True, **kwargs)

    with (ThreadPoolExecutor(threads) as pool, mode(pool, ignore_errors=True),
          patch.object(triton.JITFunction, "run", compiled_only)):  # fmt: skip
        launches()
    return True
