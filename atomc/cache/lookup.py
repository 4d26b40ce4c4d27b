"""A cold or a warm start of one program: found in the cache, or compiled and kept there."""

import logging
import time
from collections.abc import Callable
from dataclasses import replace

from atomc.cache.artifact import Unstorable
from atomc.cache.compiled import Compiled, restored
from atomc.cache.fingerprint import Parts
from atomc.cache.store import Damaged, Entry, Plain, check_plain, fill_report
from atomc.options import Options
from atomc.report import CacheOutcome, Report
from atomc.torch_compat.names import outside_of_tracing

log = logging.getLogger("atomc")


class Start:
    """The place of one program in the cache.

    parts    what the program depends on; raises Unstorable if it can be told from no other
    outcome  what the cache did for it
    """

    def __init__(self, options: Options, parts: Callable[[], Parts]):
        self.outcome = CacheOutcome()
        self.seconds = 0.0
        self.entry: Entry | None = None
        asked = "a dump" if options.dump else "an audit" if options.audit else ""
        if not options.cache or asked:
            self.outcome = CacheOutcome("off", f"{asked} was asked for" if asked else "")
            return
        try:
            self.entry = Entry(parts(), options)
        except Unstorable as error:
            self.outcome = CacheOutcome("off", str(error))

    def found(self, report: Report, misfit: Callable[[Plain], str | None]) -> tuple[Compiled, Plain] | None:
        """What an earlier start has kept, if anything: the compiled program, and all of its entry.

        report  gets what was found out then
        misfit  says of an entry why it does not serve, or None
        """
        if self.entry is None:
            return None
        start = time.perf_counter()
        try:
            return self._read(self.entry, report, misfit)
        except OSError as error:
            self.entry, self.outcome = None, CacheOutcome("off", str(error))
        except Exception as error:  # however an entry is broken, it is compiled anew
            log.warning("atomc rebuilds a damaged entry of its cache, %s: %s", self.entry.path, error)
            self.outcome = CacheOutcome("miss", f"the entry was damaged and is rebuilt: {error}")
            self.entry.delete()
        finally:
            self.seconds = time.perf_counter() - start
        return None

    def _read(
        self, entry: Entry, report: Report, misfit: Callable[[Plain], str | None]
    ) -> tuple[Compiled, Plain] | None:
        with outside_of_tracing():
            data = entry.read()
        why = entry.why_missing() if data is None else misfit(data)
        if data is None or why is not None:
            self.outcome = CacheOutcome("miss", str(why))
            return None
        try:
            with outside_of_tracing():
                compiled = restored(data["compiled"])
        except Exception as error:  # code and data of a broken entry can raise anything
            raise Damaged(f"{type(error).__name__}: {error}") from error
        fill_report(report, data["report"])
        self.outcome = CacheOutcome("hit")
        return compiled, data

    def keep(self, data: Callable[[], Plain]) -> Plain | None:
        """Write what was compiled to the cache; returns what was written. `data` raises Unstorable if that cannot be."""
        if self.entry is None:
            return None
        try:
            with outside_of_tracing():
                made = data()
                check_plain(made)
                self.entry.write(made)
            return made
        except (Unstorable, TypeError, OSError) as error:
            self.outcome = replace(self.outcome, not_kept=str(error))
            return None
