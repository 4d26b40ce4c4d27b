"""A process ends in time, whatever its threads do."""

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue

log = logging.getLogger("atomc.server")
# What ending in order may take: telling clients, closing connections, ending the engine.
CLOSE_SECONDS = 3.5
ALARM_SECONDS = 1.4


class Deadline:
    """Ends this process when time is up, although a thread still runs (Python waits for all of them), such as one that
    renders a chat template with an endless loop.

    last  called before that, to end what would be left behind; it may be set later

    A thread that holds the interpreter in one long call keeps also this from running. Then the system ends the process
    ALARM_SECONDS later, by SIGALRM.
    """

    def __init__(self, before_exit: Callable[[], None] = lambda: None) -> None:
        self.before_exit = before_exit
        self._active = True
        # Its put may interrupt itself, as in a signal handler.
        self._deadlines: SimpleQueue[tuple[float, int]] = SimpleQueue()
        threading.Thread(target=self._watch, daemon=True, name="deadline").start()

    def set(self, seconds: float, status: int) -> None:
        """The process ends with this status after so many seconds, at the latest; the earliest deadline holds."""
        self._deadlines.put((time.monotonic() + seconds, status))
        left, _ = signal.getitimer(signal.ITIMER_REAL)
        if not left or left > seconds + ALARM_SECONDS:
            signal.setitimer(signal.ITIMER_REAL, seconds + ALARM_SECONDS)

    def cancel(self) -> None:
        """No thread is left that could keep the process from ending."""
        self._active = False
        signal.setitimer(signal.ITIMER_REAL, 0)

    def _watch(self) -> None:
        earliest = self._deadlines.get()
        while (left := earliest[0] - time.monotonic()) > 0:
            try:
                earliest = min(earliest, self._deadlines.get(timeout=left))
            except Empty:
                break
        if self._active:
            self.before_exit()
            log.error("something still runs after the time to end, such as a chat template: the process is cut off")
            os._exit(earliest[1])
