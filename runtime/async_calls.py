"""Runs the calls of event loops in a thread of their own."""

import threading
from collections import deque
from collections.abc import Callable

from atomc.runtime.calls import LLMCall
from atomc.runtime.turns import Turns


class AsyncCalls:
    """The thread lives while there are calls; without any, nothing refers to the LLM."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._lock = threading.Lock()
        self._new: deque[LLMCall] = deque()
        self._running: list[LLMCall] = []
        self._changed = threading.Event()
        self._has_thread = False

    def submit(
        self, call: LLMCall, start: Callable[[LLMCall], None], step: Callable[[], None]
    ) -> None:
        """Run `start(call)` and steps until the call ends. Its error is what they raise."""
        with self._lock:
            self._new.append(call)
            if not self._has_thread:
                threading.Thread(
                    target=self._run, args=(start, step), name="atomc calls", daemon=True
                ).start()
                self._has_thread = True
        self._changed.set()

    def _run(self, start: Callable[[LLMCall], None], step: Callable[[], None]) -> None:
        while self._goes_on():
            new = [self._new.popleft() for _ in range(len(self._new))]
            self._running += new
            try:
                with self._turns.take():
                    for call in new:
                        _start(call, start)
                self._turns.step_until(self._is_done, self._changed, step)
            except BaseException as error:  # whatever a step raises, each call raises
                for call in self._running:
                    call.fail(error)

    def _goes_on(self) -> bool:
        with self._lock:
            self._has_thread = not self._is_done() or bool(self._new)
            return self._has_thread

    def _is_done(self) -> bool:
        """Whether no call is running, or there is a new one to start."""
        self._running = [call for call in self._running if call.is_running]
        return not self._running or bool(self._new)


def _start(call: LLMCall, start: Callable[[LLMCall], None]) -> None:
    if call.abandoned:
        return
    try:
        start(call)
    except BaseException as error:  # a panic in Rust is no Exception; others are started
        call.fail(error)
