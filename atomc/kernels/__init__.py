"""How ops run: one folder per provider, whose modules register their kernels when they are
imported.
"""

import functools
import importlib
import importlib.util

PROVIDERS = ("aiter", "triton", "cuda", "zentorch", "onednn", "torch")
INVARIANT = "invariant"  # only where Options(batch_invariant=True) asks for it


@functools.cache
def load(provider: str) -> str | None:
    """Import a provider's kernels, once a process. Returns why it has none here, or None."""
    package = f"{__name__}.{provider}"
    if provider not in (*PROVIDERS, INVARIANT):
        return f"provider {provider!r} is not one of ours ({', '.join(PROVIDERS)})"
    if importlib.util.find_spec(package) is None:
        return f"provider {provider!r} is not built in this version"
    try:
        importlib.import_module(package)
    # A vendor's library fails in its own ways: a missing .so is an OSError, a version check a
    # RuntimeError.
    except Exception as error:
        return f"provider {provider!r} cannot be imported: {type(error).__name__}: {error}"
    return None
