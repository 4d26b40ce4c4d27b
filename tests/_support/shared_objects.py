"""What all tests share, more than a million objects, is nothing that gc looks at: each full
collection took a second, and there are some in every compilation.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_hidden = False


def hide() -> None:
    """Hide from gc what is alive, unless it is hidden. (gc.get_freeze_count would tell, which walks
    over all of it: 0.07 seconds after every test.)
    """
    global _hidden
    if not _hidden:
        gc.collect()
        gc.freeze()
        _hidden = True


def collect_seldom() -> None:
    """Look for garbage seldom: what compilers allocate lives as long as a test, and a twelfth of the
    time of all tests went into walks over it.
    """
    gc.set_threshold(100_000, 50, 100)


@contextmanager
def shown() -> Iterator[None]:
    """For a look at all objects. What is alive is hidden again behind it: a test that compiles
    after the look would wait for a second at each full collection.
    """
    global _hidden
    gc.unfreeze()
    gc.collect()
    try:
        yield
    finally:
        gc.freeze()
        _hidden = True
