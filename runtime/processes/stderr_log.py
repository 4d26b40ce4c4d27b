"""The log of a server's processes on stderr, which never blocks them.

A write to a pipe that nothing reads blocks for ever. A thread writes; lines are dropped and counted
while too many wait.
"""

import logging
import os
import threading
import time
from queue import SimpleQueue
from typing import NoReturn

STDERR = 2
# Some megabytes of tracebacks.
MAX_WAITING = 1000
FLUSH_SECONDS = 1.0
# A pipe may be set to fail instead of blocking.
RETRY_SECONDS = 0.05


def log_to_stderr(line_format: str = "%(asctime)s %(levelname)s %(message)s") -> None:
    """Write the log, and Python's warnings, to stderr; unless the root logger has a handler."""
    logging.captureWarnings(True)
    if not logging.getLogger().handlers:
        logging.basicConfig(format=line_format, handlers=[StderrHandler()])


def exit_process(status: int) -> NoReturn:
    """Exit without the interpreter's cleanup, after writing the log for up to FLUSH_SECONDS."""
    logging.shutdown()
    os._exit(status)


class StderrHandler(logging.Handler):
    """Writes to stderr in a thread of its own."""

    def __init__(self) -> None:
        super().__init__()
        # Its `put` is reentrant, so that signal handlers can log.
        self._waiting: SimpleQueue[bytes | threading.Event] = SimpleQueue()
        self._num_dropped = 0
        threading.Thread(target=self._run, name="log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        if self._waiting.qsize() >= MAX_WAITING:
            self._num_dropped += 1
            return
        try:
            line = self.format(record)
        except Exception:  # of arguments that do not fit the message
            self.handleError(record)
            return
        self._note_dropped()
        self._waiting.put(f"{line}\n".encode(errors="backslashreplace"))

    def flush(self) -> None:
        """Wait until all lines are written, at most FLUSH_SECONDS."""
        self._note_dropped()
        written = threading.Event()
        self._waiting.put(written)
        written.wait(FLUSH_SECONDS)

    def _note_dropped(self) -> None:
        if self._num_dropped:
            note = f"{self._num_dropped} lines of the log were dropped: nothing read it\n"
            self._num_dropped = 0
            self._waiting.put(note.encode())

    def _run(self) -> None:
        while True:
            item = self._waiting.get()
            if isinstance(item, threading.Event):
                item.set()
            else:
                _write(item)


def _write(line: bytes) -> None:
    while line:
        try:
            line = line[os.write(STDERR, line) :]
        except BlockingIOError:
            time.sleep(RETRY_SECONDS)
        except OSError:  # closed: no line can be written
            return
