"""A cold or a warm start of one graph: found in the cache, or compiled and kept there."""

import logging
import time
from collections.abc import Sequence
from typing import Any

from torch.fx import GraphModule

from atomc.artifact import Unstorable
from atomc.cache import Damaged, Entry, check_plain, fill_report, plain_report, remember
from atomc.fingerprint import parts_of
from atomc.graph_pass import Context
from atomc.report import Report
from atomc.stages import Compiled, restored
from atomc.torch_compat import outside_of_tracing
from atomc.torch_tracing import fake_mode_of, guards_hold, guards_of

log = logging.getLogger("atomc")


class Start:
    """One compile of one graph of Dynamo's, with given floats. `report.cache` says what becomes of it."""

    def __init__(
        self, gm: GraphModule, example_inputs: Sequence[Any], context: Context, report: Report, floats: dict[int, float]
    ):
        self.report = report
        self.mode = fake_mode_of(gm.graph)
        self.sizes = [node.meta.get("example_value") for node in gm.graph.find_nodes(op="placeholder")]
        self.entry: Entry | None = None
        self.options = options = context.options
        asked = "a dump" if options.dump else "an audit" if options.audit else ""
        if not options.cache or asked or report.treated:
            report.cache = report.cache or (f"off: {asked} was asked for" if asked else "off")
            return
        try:
            parts = parts_of(gm, example_inputs, options, context.platform, floats, paged=context.paged)
        except Unstorable as error:
            report.cache = f"off: {error}"
            return
        self.entry = Entry(parts, options)

    def found(self) -> tuple[Compiled, list[int]] | None:
        """The compiled graph, and the numbers of the inputs that it writes, if an earlier start has kept them."""
        if self.entry is None:
            return None
        start = time.perf_counter()
        try:
            made = self._read(self.entry)
        except OSError as error:
            self.entry, self.report.cache = None, f"off: {error}"
            return None
        except Exception as error:  # however an entry is broken, it is compiled anew
            log.warning("atomc rebuilds a damaged entry of its cache, %s: %s", self.entry.path, error)
            self.report.cache = f"miss: the entry was damaged and is rebuilt: {error}"
            self.entry.delete()
            return None
        if made is not None:
            self.report.cache = "hit"
            self.report.phases["cache"] = time.perf_counter() - start
            remember(self.options, self.report)
        return made

    def _read(self, entry: Entry) -> tuple[Compiled, list[int]] | None:
        with outside_of_tracing():
            data = entry.read()
        if data is None:
            self.report.cache = f"miss: {entry.why_missing()}"
            return None
        if not guards_hold(self.mode, self.sizes, data["guards"]):
            self.report.cache = "miss: compiled for sizes of another kind"
            return None
        try:
            with outside_of_tracing():
                compiled = restored(data["compiled"])
        except Exception as error:
            raise Damaged(f"{type(error).__name__}: {error}") from error
        fill_report(self.report, data["report"])
        return compiled, list(data["written"])

    def keep(self, compiled: Compiled, written: Sequence[int], around: str | None) -> None:
        """Write what was compiled to the cache. around: what else happens in each call, which the entry would miss."""
        if self.entry is None or compiled.plain is None:
            return
        crowded = next((miss.found for miss in self.report.near if "packed with" in miss.found), None)
        try:
            if around or crowded or self.report.bugs:
                raise Unstorable(around or crowded or self.report.bugs[0])
            data = {"written": list(written), "report": plain_report(self.report),
                    "guards": guards_of(self.mode, self.sizes)}  # fmt: skip
            with outside_of_tracing():
                data["compiled"] = compiled.plain()
                check_plain(data)
                self.entry.write(data)
        except (Unstorable, TypeError, OSError) as error:
            self.report.cache += f"; not kept: {error}"
        remember(self.options, self.report)
