"""Loads one program from the cache, or stores it after a compile."""

import logging
import time
from collections.abc import Callable
from dataclasses import replace

from atomc import kernels
from atomc.cache.artifact import Uncacheable
from atomc.cache.compiled import Compiled, deserialize_compiled
from atomc.cache.fingerprint import Parts
from atomc.cache.store import DamagedEntry, Entry, ProgramData, check_plain, fill_report
from atomc.options import Options
from atomc.report.records import CacheOutcome
from atomc.report.report import Report
from atomc.torch_compat.core import outside_of_tracing

log = logging.getLogger("atomc")


class CacheLookup:
    """The cache entry of one program.

    parts    computes the cache key of the program; raises Uncacheable if it has none
    outcome  the result for the report
    """

    def __init__(self, options: Options, parts: Callable[[], Parts]):
        self.outcome = CacheOutcome()
        self.seconds = 0.0
        self.entry: Entry[ProgramData] | None = None
        requested = "a dump" if options.dump else "an audit" if options.audit else ""
        if not options.cache or requested:
            self.outcome = CacheOutcome("off", f"{requested} was asked for" if requested else "")
            return
        try:
            self.entry = Entry(parts(), options)
        except Uncacheable as error:
            self.outcome = CacheOutcome("off", str(error))

    def load(
        self, report: Report, mismatch: Callable[[ProgramData], str | None]
    ) -> tuple[Compiled, ProgramData] | None:
        """(the compiled program, its whole entry) from the cache; None on a miss.

        report    receives the stored report
        mismatch  gives the reason why an entry cannot be used, or None
        """
        if self.entry is None:
            return None
        start = time.perf_counter()
        try:
            return self._read(self.entry, report, mismatch)
        except OSError as error:
            self.entry, self.outcome = None, CacheOutcome("off", str(error))
        except Exception as error:  # a damaged entry can raise anything: it is compiled again
            log.warning("atomc rebuilds a damaged cache entry, %s: %s", self.entry.path, error)
            self.outcome = CacheOutcome("miss", f"the entry was damaged and is rebuilt: {error}")
            self.entry.delete()
        finally:
            self.seconds = time.perf_counter() - start
        return None

    def _read(
        self,
        entry: Entry[ProgramData],
        report: Report,
        mismatch: Callable[[ProgramData], str | None],
    ) -> tuple[Compiled, ProgramData] | None:
        with outside_of_tracing():
            data = entry.read()
        why = entry.why_missing() if data is None else mismatch(data) or _provider_found(data)
        if data is None or why is not None:
            self.outcome = CacheOutcome("miss", str(why))
            return None
        try:
            with outside_of_tracing():
                compiled = deserialize_compiled(data["compiled"])
        except Exception as error:  # code and data of a damaged entry can raise anything
            raise DamagedEntry(f"{type(error).__name__}: {error}") from error
        fill_report(report, data["report"])
        self.outcome = CacheOutcome("hit")
        return compiled, data

    def store(self, data: Callable[[], ProgramData]) -> ProgramData | None:
        """Write an entry and return its content; None if it could not be written. `data` may raise
        Uncacheable.
        """
        if self.entry is None:
            return None
        try:
            with outside_of_tracing():
                content = data()
                check_plain(content)
                self.entry.write(content)
            return content
        except (Uncacheable, TypeError, OSError) as error:
            self.outcome = replace(self.outcome, not_kept=str(error))
            return None


def _provider_found(data: ProgramData) -> str | None:
    """The first provider that was missing and can be imported now, as a reason to compile again."""
    importable = (name for name in data["missing"] if kernels.load(name) is None)
    return next((f"provider {name} can be imported now" for name in importable), None)
