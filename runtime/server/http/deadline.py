"""Ends the process at a deadline, even if threads still run."""

import logging
import signal
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue

from atomc.runtime.processes.stderr_log import exit_process

log = logging.getLogger("atomc.server")
# Time for a regular shutdown: answering clients, closing connections, ending the engine.
CLOSE_SECONDS = 3.5
ALARM_SECONDS = 1.4


class Deadline:
    """Exits this process at the deadline without waiting for threads, such as one that renders a
    chat template with an endless loop. Python itself would wait for them.

    before_exit   called before the exit, to end child processes; may be set later

    A thread that holds the GIL in one long call blocks this thread, too. Then SIGALRM ends the
    process ALARM_SECONDS later.
    """

    def __init__(self, before_exit: Callable[[], None] = lambda: None) -> None:
        self.before_exit = before_exit
        self._active = True
        # SimpleQueue.put is reentrant, so it can be called in a signal handler.
        self._deadlines: SimpleQueue[tuple[float, int]] = SimpleQueue()
        threading.Thread(target=self._watch, daemon=True, name="deadline").start()

    def set(self, seconds: float, status: int) -> None:
        """Exit with `status` after `seconds`; of several deadlines, the earliest applies."""
        self._deadlines.put((time.monotonic() + seconds, status))
        left, _ = signal.getitimer(signal.ITIMER_REAL)
        if not left or left > seconds + ALARM_SECONDS:
            signal.setitimer(signal.ITIMER_REAL, seconds + ALARM_SECONDS)

    def cancel(self) -> None:
        """Disable the deadline: no remaining thread blocks the exit."""
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
            log.error(
                "a thread still runs at the shutdown deadline, such as a chat template: "
                "exiting anyway"
            )
            exit_process(earliest[1])
