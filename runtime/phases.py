"""How long each part of a start takes, with a bar on the terminal meanwhile."""

import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tqdm import tqdm


class Phases:
    """Seconds of each part; progress: whether there is a bar, on a terminal."""

    def __init__(self, names: Sequence[str], *, progress: bool) -> None:
        self.seconds: dict[str, float] = {}
        # disable=None: no bar where there is no terminal.
        self._bar = tqdm(
            total=len(names), unit="phase", leave=False, disable=None if progress else True
        )

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self._bar.set_description(name)
        started = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - started
        self._bar.update()

    def close(self) -> None:
        self._bar.close()


@contextmanager
def uncollected() -> Iterator[None]:
    """No garbage collection inside: while compiling it takes a second in all, and a capture may
    free nothing.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
