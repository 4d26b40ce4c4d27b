"""Private API of Triton, and of Inductor's launcher of Triton kernels: seeing each launch of a
thread, and launching again.
"""

import functools
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

# Stands for the current stream in the arguments of a launch.
STREAM = object()


@dataclass(frozen=True)
class Launch:
    """A launch of a kernel: function(*head, *args, **kwargs).

    head       what depends on neither tensors nor sizes of them: grid, STREAM, handles
    args       of the kernel; a tensor stands for its address
    addresses  whether the function takes addresses as integers; otherwise it takes tensors
    """

    function: Callable[..., object]
    head: tuple[Any, ...]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    addresses: bool = True


@contextmanager
def watched_launches(seen: Callable[[Launch], None]) -> Iterator[None]:
    """Call `seen` for each kernel that this thread has launched with Triton or with Inductor."""
    thread, depth = threading.get_ident(), 0

    def watch(owner: type, name: str, launch_of: Callable[..., Launch]) -> None:
        launch = getattr(owner, name)

        @functools.wraps(launch)
        def watched(self: Any, *args: Any, **kwargs: Any) -> object:
            nonlocal depth
            if threading.get_ident() != thread or depth:
                return launch(self, *args, **kwargs)
            depth += 1
            try:
                # The interpreter calls torch, and Inductor tries the forms of a kernel.
                with _disable_current_modes():
                    result = launch(self, *args, **kwargs)
            finally:
                depth -= 1
            seen(launch_of(self, *args, **kwargs))
            return result

        watching.enter_context(patch.object(owner, name, watched))

    with ExitStack() as watching:
        if "triton" in sys.modules:
            from triton import knobs

            if knobs.runtime.interpret:
                from triton.runtime.interpreter import GridExecutor

                watch(GridExecutor, "__call__", _interpreted)
            elif torch.cuda.is_available():
                from triton.runtime import driver

                watch(driver.active.launcher_cls, "__call__", _compiled)
        if inductor := sys.modules.get("torch._inductor.runtime.triton_heuristics"):
            watch(inductor.CachingAutotuner, "run", _of_inductor)
        yield


def _compiled(launcher: Any, *args: Any) -> Launch:
    """Triton passes grid (3), stream, function, metadata, metadata for hooks, and two hooks."""
    grid, (function, metadata), kernel_args = args[:3], args[4:6], args[9:]
    return Launch(launcher, (*grid, STREAM, function, metadata, None, None, None), kernel_args)


def _of_inductor(autotuner: Any, *args: Any, **kwargs: Any) -> Launch:
    """By now one of the forms of the kernel is left."""
    (launcher,) = autotuner.launchers
    return Launch(launcher, (), args, {**kwargs, "stream": STREAM})


def _interpreted(executor: Any, *args: Any, **kwargs: Any) -> Launch:
    head = (executor.fn, tuple(executor.arg_names), executor.grid)
    return Launch(interpret, head, args, kwargs, addresses=False)


def interpret(function: Any, names: tuple[str, ...], grid: Any, *args: Any, **kwargs: Any) -> None:
    """Run a kernel in Triton's interpreter."""
    from triton.runtime.interpreter import GridExecutor

    GridExecutor(function, list(names), grid)(*args, **kwargs)


def launch_again(launch: Launch, device: torch.device) -> None:
    """Launch a kernel on the current stream of a device."""
    stream = current_stream(device)

    def value(x: Any) -> Any:
        return stream if x is STREAM else x.data_ptr() if isinstance(x, torch.Tensor) else x

    head, args = tree_map(value, (launch.head, launch.args))
    launch.function(*head, *args, **tree_map(value, dict(launch.kwargs)))


def launches_are_hooked() -> bool:
    """Whether a hook, such as that of a profiler, is called at each launch of Triton."""
    triton = sys.modules.get("triton")
    return triton is not None and bool(
        triton.knobs.runtime.launch_enter_hook.calls or triton.knobs.runtime.launch_exit_hook.calls
    )


def current_stream(device: torch.device) -> int:
    """The handle of the current stream of a device; 0 on the CPU."""
    return torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else 0
