"""The time of each phase of a compilation."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from atomc.report.report import Report


@contextmanager
def timed(report: Report, phase: str) -> Iterator[None]:
    """Add the seconds spent inside to a phase of the report."""
    start = time.perf_counter()
    try:
        yield
    finally:
        report.phases[phase] = report.phases.get(phase, 0.0) + time.perf_counter() - start
