"""Private API of Inductor: seeing each call of a C++ kernel by its generated Python."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import BuiltinFunctionType
from typing import Any
from weakref import WeakSet

from atomc.torch_compat.launches import Launch

# What holds the generated functions that may call C++ kernels: Inductor forgets their modules when
# its caches are cleared, though the functions are in use.
_callers: "WeakSet[Any]" = WeakSet()


def remember_cpp_kernels() -> None:
    """Let `watched_cpp_kernels` see the kernels of all code that Inductor has loaded until now."""
    from torch._inductor.codecache import PyCodeCache

    for module in PyCodeCache.modules:
        call = getattr(module, "call", None)
        if call is not None:
            _callers.add(getattr(call, "__self__", call))


@contextmanager
def watched_cpp_kernels(seen: Callable[[Launch], None]) -> Iterator[None]:
    """Call `seen` for each C++ kernel of Inductor that this thread has called.

    A kernel is a global of the code that calls it, where a function takes its place meanwhile.
    """
    thread = threading.get_ident()

    def watched(kernel: Callable[..., object]) -> Callable[..., object]:
        def call(*args: Any) -> object:
            result = kernel(*args)
            if threading.get_ident() == thread:
                seen(Launch(kernel, (), args, addresses=False))
            return result

        return call

    kernels = [
        (names, name, value)
        for names in [_globals(caller) for caller in list(_callers)]
        for name, value in list(names.items())
        if isinstance(value, BuiltinFunctionType) and value.__name__ == "kernel"
    ]
    for names, name, kernel in kernels:
        names[name] = watched(kernel)
    try:
        yield
    finally:
        for names, name, kernel in kernels:
            names[name] = kernel


def _globals(caller: Any) -> dict[str, Any]:
    """Those of a function, or of the methods of an object of a generated class."""
    function = getattr(caller, "call", caller)
    names: dict[str, Any] = getattr(function, "__func__", function).__globals__
    return names
