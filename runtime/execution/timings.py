"""Duration of the phases of a start, with a progress bar."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tqdm import tqdm


class Phases:
    """Seconds of each phase. progress: show a bar on a terminal."""

    def __init__(self, names: Sequence[str], *, progress: bool) -> None:
        self.seconds: dict[str, float] = {}
        self.progress = progress
        # disable=None: no bar without a terminal.
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
