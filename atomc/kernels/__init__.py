"""Kernels: one folder per provider, whose modules register their kernels on import. Its MODULES are
in order of preference.
"""

import contextlib
import functools
import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from atomc.ops.op import REGISTRY
from atomc.options import Options
from atomc.trusted_folder import trusted_folder

PROVIDERS = ("aiter", "mori", "triton", "cuda", "zentorch", "onednn", "fla", "torch")
INVARIANT = "invariant"  # only where Options(batch_invariant=True) asks for it

# Those whose every launch is one of Triton, of Inductor or of an op of PyTorch.
VISIBLE = ("triton", "cuda", "zentorch", "onednn", "torch", INVARIANT)


def providers_of(options: Options) -> tuple[str, ...]:
    """The providers whose kernels a program may run, in order of preference."""
    wanted = options.providers or PROVIDERS
    return (INVARIANT, *wanted) if options.batch_invariant else wanted


def missing(options: Options) -> dict[str, str]:
    """Those of ours that have no kernels here, and why."""
    shipped = [name for name in providers_of(options) if name in (*PROVIDERS, INVARIANT)]
    return {name: why for name in shipped if (why := load(name)) is not None}


@functools.cache
def load(provider: str) -> str | None:
    """Import a provider's kernels, once per process. Returns why it has none here, or None."""
    package = f"{__name__}.{provider}"
    if provider not in (*PROVIDERS, INVARIANT):
        return f"provider {provider!r} is not one of ours ({', '.join(PROVIDERS)})"
    if importlib.util.find_spec(package) is None:
        return f"provider {provider!r} is not built in this version"
    try:
        modules = [f"{package}.{name}" for name in importlib.import_module(package).MODULES]
        for module in modules:
            importlib.import_module(module)
        _use_trusted_folder()
    except Exception as error:  # a vendor's library can raise anything, such as OSError for a .so
        return f"provider {provider!r} cannot be imported: {type(error).__name__}: {error}"
    _restore_order(modules)
    return None


@functools.cache
def load_module(name: str) -> ModuleType:
    """A module by its full name. If Triton is imported after that, its cache is in a trusted
    folder; looked at once, because sampling loads its kernel here in each step. Raises what the
    import raises.
    """
    module = importlib.import_module(name)
    _use_trusted_folder()
    return module


def start_triton() -> None:
    """Begin what Triton does once a process, in a thread, if Triton is installed."""
    with contextlib.suppress(Exception):  # raised again, with its reason, by what imports a kernel
        load_module(f"{__name__}.triton.launch.parallel_compile").start_triton()


def _restore_order(modules: Sequence[str]) -> None:
    """Sort the kernels of these modules as the modules, whatever was imported first."""
    number = {name: i for i, name in enumerate(modules)}
    for op in REGISTRY.values():
        places = [i for i, kernel in enumerate(op.kernels) if kernel.function.__module__ in number]
        in_order = sorted(
            [op.kernels[i] for i in places], key=lambda x: number[x.function.__module__]
        )
        for i, kernel in zip(places, in_order, strict=True):
            op.kernels[i] = kernel


def _use_trusted_folder() -> None:
    """Triton, if it is imported, loads libraries from its cache: one that other users may write is
    replaced.
    """
    if (triton := sys.modules.get("triton")) is None:
        return
    folder = triton.knobs.cache.dir
    trusted = str(trusted_folder(Path(folder), "triton"))
    if trusted != folder:
        os.environ["TRITON_CACHE_DIR"] = trusted
