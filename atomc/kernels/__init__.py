"""Kernels: one folder per provider, whose modules register their kernels on import."""

import functools
import importlib
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

from atomc.trusted_folder import trusted_folder

PROVIDERS = ("aiter", "triton", "cuda", "zentorch", "onednn", "fla", "torch")
INVARIANT = "invariant"  # only where Options(batch_invariant=True) asks for it

# Those whose every launch is one of Triton, of Inductor or of an op of PyTorch.
VISIBLE = ("triton", "cuda", "zentorch", "onednn", "torch", INVARIANT)


@functools.cache
def load(provider: str) -> str | None:
    """Import a provider's kernels, once per process. Returns why it has none here, or None."""
    package = f"{__name__}.{provider}"
    if provider not in (*PROVIDERS, INVARIANT):
        return f"provider {provider!r} is not one of ours ({', '.join(PROVIDERS)})"
    if importlib.util.find_spec(package) is None:
        return f"provider {provider!r} is not built in this version"
    try:
        importlib.import_module(package)
        if triton := sys.modules.get("triton"):
            _use_trusted_folder(triton)
    except Exception as error:  # a vendor's library can raise anything, such as OSError for a .so
        return f"provider {provider!r} cannot be imported: {type(error).__name__}: {error}"
    return None


def _use_trusted_folder(triton: ModuleType) -> None:
    """Triton loads libraries from its cache: one that other users may write is replaced."""
    folder = triton.knobs.cache.dir
    trusted = str(trusted_folder(Path(folder), "triton"))
    if trusted != folder:
        os.environ["TRITON_CACHE_DIR"] = trusted
