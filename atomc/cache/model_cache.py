"""A model that the cache knows without a trace: found by a description of its modules.

What a model computes follows from its code, from what its modules are set to, and from which tensors they have. So a model
all of whose code is ours or torch's is described module by module, and a model of equal description runs what was compiled
for the first one, on its own tensors. Whatever cannot be described as equal text for equal things - a hook, a replaced
forward, a class of somebody else's - is Unstorable: such a model is traced at each start.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from atomc.cache.artifact import Unstorable
from atomc.cache.compiled import Compiled
from atomc.cache.lookup import Start
from atomc.cache.model_fingerprint import described, tensors_of
from atomc.cache.store import Plain, remember
from atomc.options import Options
from atomc.platform import Platform
from atomc.report import Report


@dataclass(frozen=True)
class Found:
    """What the cache holds of a known model.

    inputs  of each input of Dynamo's graph the tensor of this model; None for one of the step
    """

    compiled: Compiled
    inputs: list[Any]
    report: Report


class KnownStart:
    """One start of one model.

    looked_at  somebody wants to see the graphs: the model is traced, known or not
    """

    def __init__(self, model: nn.Module, options: Options, platform: Platform, *, looked_at: bool):
        self.model, self.options = model, options
        self.looked_at = looked_at or options.report is not None or options.record
        start = time.perf_counter()
        self.start = Start(options, lambda: described(model, options, platform))
        self.seconds = time.perf_counter() - start

    def found(self) -> Found | None:
        """What an earlier start has kept of such a model, if anything."""
        if self.looked_at:
            return None
        inputs: list[Any] = []

        def misfit(data: Plain) -> str | None:
            tensors = {path: tensor for tensor, path in tensors_of(self.model)}
            inputs.extend(None if path is None else tensors[path] for path in data["places"])
            return None

        report = Report(type(self.model).__name__)
        found = self.start.found(report, misfit)
        if found is None:
            return None
        compiled, data = found
        report.model, report.cached = data["model"], self.start.outcome
        report.phases["cache"] = self.seconds + self.start.seconds
        remember(self.options, report)
        return Found(compiled, inputs, report)

    def keep(self, report: Report, entry: Plain | None, sources: Sequence[str | None], inputs: Sequence[Any]) -> None:
        """Write down how the traced model is found again; the report says why it had to be traced.

        entry  what the cache holds of its graph, None if nothing
        sources, inputs  as of atomc.trace_model.Traced
        """
        if self.looked_at or report.cached.kind == "off":
            return
        why = self.start.outcome.why
        if self.start.entry is None:
            report.notes.append(f"traced at each start: {why}")
            return
        if report.cached.kind == "hit":
            report.notes.append(f"traced, and then found in the cache: {why}")
        else:
            report.cached = replace(self.start.outcome, not_kept=report.cached.not_kept)
        if entry is not None:
            self.start.keep(lambda: {**entry, "model": report.model, "places": self._places(entry, sources, inputs)})
            unknown = self.start.outcome.not_kept
            report.notes += [f"traced at each start: {unknown}"] * bool(unknown)

    def _places(self, entry: Plain, sources: Sequence[str | None], inputs: Sequence[Any]) -> list[str | None]:
        """Where the model has each input of the graph: a path, None for one of the step."""
        if entry["guards"] is not None:
            raise Unstorable("it was compiled for certain sizes")
        paths = {id(tensor): path for tensor, path in reversed(tensors_of(self.model))}
        found: list[str | None] = []
        for source, given in zip(sources, inputs, strict=True):
            if given is None:
                found.append(None)
            elif isinstance(given, Tensor) and id(given) in paths:
                found.append(paths[id(given)])
            else:
                raise Unstorable(f"its graph reads {source}, which is no parameter or buffer")
        return found
