"""When Python's garbage collector runs in the processes of an engine and a server."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_disabled() -> Iterator[None]:
    """Disable garbage collection: it takes about a second of a compilation, and a CUDA graph
    capture must not free memory.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def frozen_imports() -> Iterator[None]:
    """Disable garbage collection, and leave what was imported out of later ones: those while torch
    and the engine are imported take 0.2 s. For processes of our own only.
    """
    with gc_disabled():
        yield
        gc.freeze()


# As in gc.set_threshold: objects that are created between two collections, which look at the newest
# ones, and how many of these are between two of older and of the oldest ones. With Python's 700, 10
# and 10, collections while 256 requests arrived took 37 ms in all, one of them 11.
THRESHOLDS = 5_000, 5, 100


def freeze_heap() -> None:
    """Collect garbage, leave what lives now out of later collections, and let these be rare: one of
    a process with the libraries of a server takes 60 ms, in which every stream waits. For processes
    of our own only.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
