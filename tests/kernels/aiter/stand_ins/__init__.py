"""Stand-ins for functions of AITER, compiled ones and those in Triton: plain PyTorch with the
documented semantics, in a package `aiter` that exists only inside `installed`.

Each module of this package holds one family of functions. A stand-in has the name and the argument
names of AITER's function, reads each argument in the documented order, layout and scale, writes the
arguments that AITER writes, and raises where AITER checks its arguments. It shares no code with
atomc: what a lowering gets wrong must not be wrong here in the same way.
"""

import contextlib
import functools
import importlib
import pkgutil
import sys
import types
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import ParamSpec, TypeVar
from unittest import mock

from atomc.kernels.aiter import library

P = ParamSpec("P")
T = TypeVar("T")

# (module of AITER, name) -> stand-in.
STAND_INS: dict[tuple[str, str], Callable[..., object]] = {}
# The architecture of the GPU that the stand-ins play.
ARCH: ContextVar[str] = ContextVar("ARCH")


def stands_for(*modules: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Registers a stand-in as the function of the same name in these modules of AITER."""

    def register(function: Callable[P, T]) -> Callable[P, T]:
        for module in modules:
            STAND_INS[module, function.__name__] = function
        return function

    return register


@contextlib.contextmanager
def installed(arch: str) -> Iterator[set[str]]:
    """Inside, `import aiter` finds the stand-ins and nothing else; yields the names of those that
    were called so far, as "module.name".
    """
    called: set[str] = set()

    def recorded(name: str, function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            called.add(name)
            return function(*args, **kwargs)

        return call

    modules: dict[str, types.ModuleType] = {}
    for (path, name), function in STAND_INS.items():
        parts = path.split(".")
        for length in range(1, len(parts) + 1):
            dotted = ".".join(parts[:length])
            if dotted not in modules:
                modules[dotted] = types.ModuleType(dotted)
                modules[dotted].__path__ = []
        is_class = isinstance(function, type)
        own = function if is_class else recorded(f"{path}.{name}", function)
        setattr(modules[path], name, own)
    forget()
    token = ARCH.set(arch)
    try:
        sys.modules.update(modules)
        with mock.patch.object(library, "missing", lambda: None):
            yield called
    finally:
        ARCH.reset(token)
        forget()


def of(function: library.Function) -> Callable[..., object]:
    """The stand-in for a function. Raises StopIteration if there is none."""
    return next(
        STAND_INS[module, function.name]
        for module in function.modules
        if (module, function.name) in STAND_INS
    )


def forget() -> None:
    """Let atomc look for AITER and its functions anew."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "aiter"]:
        del sys.modules[name]
    library.missing.cache_clear()
    for function in library.FUNCTIONS:
        vars(function).pop("found", None)


for family in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{family.name}")
