"""Triton's interpreter does once a launch what it does at each call of a function in a kernel.

By itself it walks over the members of triton.language at each such call, to replace those that are
replaced already: a third of its time, and half of it in kernels of many small functions.
"""

from typing import Any

from triton.runtime import interpreter


def patch_once_a_launch() -> None:
    """From now on a launch in this process patches triton.language once for each function that it
    calls, and looks numpy's dtypes up.
    """
    patch, execute = interpreter._patch_lang, interpreter.GridExecutor.__call__
    numpy_dtype = interpreter._get_np_dtype
    patched: set[Any] = set()
    known: dict[str, Any] = {}

    def patch_lang(fn):
        if fn in patched:
            return None  # only a launch restores what was there, and it is the first to ask
        patched.add(fn)
        return patch(fn)

    def launch(self, *args, **kwargs):
        patched.clear()  # the launch before has restored what it replaced
        return execute(self, *args, **kwargs)

    def get_np_dtype(dtype):
        found = known.get(dtype.name)
        if found is None:
            found = known[dtype.name] = numpy_dtype(dtype)
        return found

    interpreter._patch_lang = patch_lang
    interpreter.GridExecutor.__call__ = launch
    interpreter._get_np_dtype = get_np_dtype
