"""The page of `options={"report": "out.html"}`: all graphs, written after each compile.

It is written again when the process ends, to include CUDA graphs and notes that were added later.
With many graphs, some compiles do not write it, to limit the time. A failure to write is logged
once, and does not fail the program.
"""

import atexit
import logging
import threading
import time
from pathlib import Path

from atomc.files.atomic_file import write_atomically
from atomc.options import Options
from atomc.report.report import Report

log = logging.getLogger("atomc")

# Limits of the time to write pages before exit: seconds, plus a fraction of the time since the
# first compile.
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
        if not any(report is earlier for earlier in self.reports):
            self.reports.append(report)
        if self.spent <= SECONDS + SHARE * (time.monotonic() - self.begun):
            self.write()

    def write(self) -> None:
        start = time.monotonic()
        try:
            from atomc.report.render.html import page

            write_atomically(self.path, page(self.reports).encode())
        except Exception as error:  # a failed report must not fail the program
            if not self.failed:
                log.warning("atomc could not write its report to %s: %s", self.path, error)
            self.failed = True
        self.spent += time.monotonic() - start


_pages: dict[Path, _Page] = {}
_writing = threading.Lock()


def publish(report: Report, options: Options) -> None:
    """Add the report to the page of option `report`, if set."""
    if options.report is None:
        return
    path = Path(options.report).expanduser().absolute()
    with _writing:
        if path not in _pages:
            _pages[path] = _Page(path)
            atexit.register(_pages[path].write)
        _pages[path].add(report)
