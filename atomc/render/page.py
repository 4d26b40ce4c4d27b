"""The page that `options={"report": "out.html"}` asks for: all graphs of the process, written anew after each compile.

It is written once more when the process ends, since CUDA graphs and notes come later. Of very many graphs not every compile
writes it, so that writing stays a small part of the time. A page that cannot be written is told once in the log, and never
breaks the program.
"""

import atexit
import contextlib
import logging
import os
import tempfile
import threading
import time
from pathlib import Path

from atomc.options import Options
from atomc.report import Report

log = logging.getLogger("atomc")

# Seconds of writing, and the share of the time since the first compile, that a page may cost before the process ends.
SECONDS = 5.0
SHARE = 0.05


class _Page:
    """One file, and the reports in it."""

    def __init__(self, path: Path):
        self.path = path
        self.reports: list[Report] = []
        self.failed = False
        self.begun = time.monotonic()
        self.spent = 0.0

    def add(self, report: Report) -> None:
        if not any(report is known for known in self.reports):
            self.reports.append(report)
        if self.spent <= SECONDS + SHARE * (time.monotonic() - self.begun):
            self.write()

    def write(self) -> None:
        start = time.monotonic()
        try:
            from atomc.render.html import page

            write_atomically(self.path, page(self.reports))
        except Exception as error:  # a report must not break what it tells of
            if not self.failed:
                log.warning("atomc could not write its report to %s: %s", self.path, error)
            self.failed = True
        self.spent += time.monotonic() - start


_pages: dict[Path, _Page] = {}
_writing = threading.Lock()


def publish(report: Report, options: Options) -> None:
    """Write the report into the page that the options name, if they name one."""
    if options.report is None:
        return
    path = Path(options.report).expanduser().absolute()
    with _writing:
        if path not in _pages:
            _pages[path] = _Page(path)
            atexit.register(_pages[path].write)
        _pages[path].add(report)


def write_atomically(path: Path, text: str) -> None:
    """Write a file so that readers see all of it or what was there before. Raises OSError."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(name, 0o666 & ~_current_umask())
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def _current_umask() -> int:
    """What new files are denied; the system tells it only to who sets it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
