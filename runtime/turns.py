"""Threads take turns at one engine, and share its steps."""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from atomc.errors import RunError
from atomc.runtime.interrupts import Interrupts, interrupts_delayed

# A thread that waits looks this often whether Ctrl-C was pressed.
POLL_SECONDS = 0.1


class Turns:
    """In a turn, a thread is the only one that uses the engine, and signals are delayed.

    Turns are short: a step, or adding the requests of a call. One of the threads whose calls wait
    for results runs the steps of all of them.

    device  of the engine; each thread has a current CUDA device of its own
    """

    def __init__(self, device: torch.device) -> None:
        self.closed = False
        self._device = device
        # A thread waits for the second lock while it holds the first, so that the one whose turn
        # ends is behind it.
        self._next, self._turn = threading.Lock(), threading.Lock()
        self._owner: int | None = None
        self._stream: torch.cuda.Stream | None = None  # of the last turn
        self._stepping = threading.RLock()
        self._waiting: dict[threading.Event, None] = {}  # in the order of their arrival
        self._deferred: deque[Callable[[], object]] = deque()

    @contextmanager
    def take(self, *, closed_too: bool = False) -> Iterator[None]:
        """Wait for a turn, which this context is. Raises RunError if the LLM is closed, unless
        closed_too, and if this thread has the turn already: its step would wait for itself.
        """
        if self._owner == threading.get_ident():
            raise RunError("the LLM is called by what it runs itself, in one of its own steps")
        with interrupts_delayed() as interrupts:
            _acquire(self._next, interrupts)
            try:
                _acquire(self._turn, interrupts)
            finally:
                self._next.release()
            try:
                self._owner = threading.get_ident()
                self._run_deferred()
                if self.closed and not closed_too:
                    raise RunError("the LLM is closed: create another one")
                with self._settings_of_thread():
                    yield
            finally:
                self._owner = None
                self._turn.release()
            self._try_deferred()

    def defer(self, work: Callable[[], object]) -> None:
        """Do this work, which is short, at once if no thread has the turn, else when that ends.
        Never waits: finalizers call it, in any thread and at any time.
        """
        self._deferred.append(work)
        self._try_deferred()

    def step_until(
        self, is_done: Callable[[], bool], changed: threading.Event, step: Callable[[], None]
    ) -> None:
        """Run steps until `is_done`, or wait for another thread that runs them.

        changed  set when `is_done` may have changed

        Raises what a step raises in this thread, and RunError if the LLM is closed.
        """
        with interrupts_delayed() as interrupts:
            try:
                # Before the lock is tried: the thread that releases it wakes the next one.
                self._waiting[changed] = None
                while not is_done():
                    if self._stepping.acquire(blocking=False):
                        try:
                            self._run_steps(is_done, step, interrupts)
                        finally:
                            self._stepping.release()
                    else:
                        changed.wait(POLL_SECONDS)
                        changed.clear()
                    if interrupts is not None:
                        interrupts.deliver()
            finally:
                del self._waiting[changed]
                self._wake_next()

    def _run_steps(
        self, is_done: Callable[[], bool], step: Callable[[], None], interrupts: Interrupts | None
    ) -> None:
        while not is_done():
            with self.take():
                if not is_done():
                    step()
            if interrupts is not None:
                interrupts.deliver()

    def _wake_next(self) -> None:
        """Let a thread that waits run the steps; harmless if another one does."""
        for changed in list(self._waiting)[:1]:
            changed.set()

    def close(self, work: Callable[[], object]) -> None:
        """Do this work in the last turn: later ones raise RunError. The second time, do nothing."""
        with self.take(closed_too=True):
            if not self.closed:
                self.closed = True
                work()
        for changed in list(self._waiting):
            changed.set()

    def _try_deferred(self) -> None:
        # Again after the release: a thread may have found the lock taken after the last look.
        with interrupts_delayed():
            while self._deferred and self._turn.acquire(blocking=False):
                try:
                    self._owner = threading.get_ident()
                    self._run_deferred()
                finally:
                    self._owner = None
                    self._turn.release()

    def _run_deferred(self) -> None:
        while self._deferred:
            self._deferred.popleft()()

    @contextmanager
    def _settings_of_thread(self) -> Iterator[None]:
        """The device of the engine; its work follows that of the turn before, of another thread."""
        if self._device.type != "cuda":
            torch.get_num_threads()  # a thread adopts torch's number when it first asks for it
            yield
            return
        with torch.cuda.device(self._device):
            stream = torch.cuda.current_stream()
            if self._stream is not None and stream != self._stream:
                stream.wait_stream(self._stream)
            self._stream = stream
            yield


def _acquire(lock: threading.Lock, interrupts: Interrupts | None) -> None:
    while not lock.acquire(timeout=POLL_SECONDS):
        if interrupts is not None:
            interrupts.deliver()
