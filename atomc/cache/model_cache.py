"""Finds a compiled model in the cache without tracing it, by a description of its modules.

Code, module attributes and tensors determine what a model computes. A model that consists of code
of atomc, transformers and torch is described module by module; a model with an equal description
runs the stored program on its own tensors. A model with a hook, a replaced forward or a class from
elsewhere has no reliable description: it is Uncacheable, and traced at each start.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn

from atomc.cache.artifact import Uncacheable
from atomc.cache.compiled import Compiled
from atomc.cache.lookup import CacheLookup
from atomc.cache.model_fingerprint import model_parts, named_tensors
from atomc.cache.store import ProgramData, record_start
from atomc.ops.inputs import ModelInputs
from atomc.options import Options
from atomc.platform import Platform
from atomc.report.report import Report
from atomc.torch_compat.core import Input


@dataclass(frozen=True)
class CompiledModel:
    """A model that was traced, or loaded from the cache.

    inputs   for each input of Dynamo's graph the tensor of the model; None for an argument
    arguments  for each input of Dynamo's graph (name, None) if it is an argument of the call,
             (name, dim) if it is the size of one; None for a tensor of the model
    key      the cache key of its graph, None if the cache was not used
    sources  of a traced model: the source expression of each input of Dynamo's graph
    entry    of a traced model: the content of the cache entry of its graph, if there is one
    """

    compiled: Compiled
    inputs: Sequence[Input]
    arguments: Sequence[tuple[str, int | None] | None]
    report: Report
    key: str | None
    sources: Sequence[str | None] = ()
    entry: ProgramData | None = None


class ModelCache:
    """Loads or stores one program of a model.

    takes     its inputs: as in atomc.program.compile_model, or words that no other program has
    owned     as in atomc.program.compile_model
    observed  graphs were requested, so that the model is traced even if the cache has it
    """

    def __init__(
        self,
        model: nn.Module,
        options: Options,
        platform: Platform,
        takes: ModelInputs | str,
        *,
        owned: bool,
        observed: bool,
    ):
        self.model, self.options = model, options
        self.observed = observed or options.report is not None or options.record
        start = time.perf_counter()
        self.lookup = CacheLookup(
            options, lambda: model_parts(model, options, platform, takes, owned)
        )
        self.seconds = time.perf_counter() - start

    def load(self) -> CompiledModel | None:
        """The model from the cache; None on a miss."""
        if self.observed:
            return None
        inputs: list[Tensor | None] = []

        def mismatch(data: ProgramData) -> str | None:
            tensors = {path: tensor for tensor, path in named_tensors(self.model)}
            inputs.extend(None if path is None else tensors[path] for path in data["places"])
            return None

        report = Report(type(self.model).__name__)
        loaded = self.lookup.load(report, mismatch)
        if loaded is None:
            return None
        compiled, data = loaded
        report.model, report.cached = data["model"], self.lookup.outcome
        report.phases["cache"] = self.seconds + self.lookup.seconds
        record_start(self.options, report)
        return CompiledModel(compiled, inputs, data["arguments"], report, data["graph"])

    def store(self, traced: CompiledModel) -> None:
        """Store the traced model under its description; the report says why it was traced."""
        report, entry, key = traced.report, traced.entry, traced.key
        if self.observed or report.cached.kind == "off":
            return
        why = self.lookup.outcome.why
        if self.lookup.entry is None:
            report.notes.append(f"traced at each start: {why}")
            return
        if report.cached.kind == "hit":
            report.notes.append(f"traced, and then found in the cache: {why}")
        else:
            report.cached = replace(self.lookup.outcome, not_kept=report.cached.not_kept)
        if entry is not None and key is not None:
            self.lookup.store(
                lambda: {
                    **entry,
                    "model": report.model,
                    "places": self._places(entry, traced),
                    "arguments": list(traced.arguments),
                    "graph": key,
                }
            )
            unknown = self.lookup.outcome.not_kept
            report.notes += [f"traced at each start: {unknown}"] * bool(unknown)

    def _places(self, entry: ProgramData, traced: CompiledModel) -> list[str | None]:
        """The path in the model of each input of the graph; None for an argument."""
        if entry["guards"] is not None:
            raise Uncacheable("it was compiled under size guards")
        paths = {id(tensor): path for tensor, path in reversed(named_tensors(self.model))}
        places: list[str | None] = []
        for source, tensor in zip(traced.sources, traced.inputs, strict=True):
            if tensor is None:
                places.append(None)
            elif isinstance(tensor, Tensor) and id(tensor) in paths:
                places.append(paths[id(tensor)])
            else:
                raise Uncacheable(
                    f"its graph reads {source}, which is neither a parameter nor a buffer"
                )
        return places
