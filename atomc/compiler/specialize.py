"""Compiles a graph once per value of its float inputs, which Dynamo does not guard."""

import threading
from collections.abc import Sequence

from torch import Tensor
from torch.fx import GraphModule

from atomc.cache.compiled import weight_inputs, with_weights
from atomc.capture.floats import inline_floats
from atomc.capture.inline_regions import regions_of
from atomc.capture.subclasses import subclass_reason
from atomc.compiler.cudagraphs import Graphed
from atomc.compiler.driver import build
from atomc.options import Options
from atomc.platform import Platform
from atomc.report import contract
from atomc.report.report import Report
from atomc.rewriting.graph_pass import Context
from atomc.torch_compat.core import GraphFunction, Input, Outputs
from atomc.torch_compat.tracing import (
    editable_copy,
    fake_mode_of,
    lifted_floats,
    num_guards,
    tracing_context,
)

# For further values, the graph runs uncompiled.
MAX_FLOAT_VALUES = 8


class Specialized:
    """A callable of one graph, compiled once per tuple of its float inputs."""

    def __init__(
        self,
        gm: GraphModule,
        example_inputs: Sequence[Input],
        options: Options,
        platform: Platform | None,
        report: Report,
    ):
        self.gm, self.inputs, self.options, self.report = gm, list(example_inputs), options, report
        self.platform = platform or Platform.detect(device_of(example_inputs))
        placeholders = gm.graph.find_nodes(op="placeholder")
        self.floats = [placeholders.index(node) for node in lifted_floats(gm.graph)]
        self.mode = fake_mode_of(gm.graph)
        self.compiled: dict[tuple[float, ...], GraphFunction] = {}
        self.lock = threading.Lock()

    def first(self) -> GraphFunction:
        values = self.values(self.inputs)
        self.compiled[values] = self.compile(values, self.inputs)
        if not self.floats:
            return self.compiled[values]
        self.inputs = []  # do not keep the caller's tensors alive
        return self

    def values(self, args: Sequence[Input]) -> tuple[float, ...]:
        given = [args[i] for i in self.floats]
        return tuple(float(value) for value in given if value is not None)

    def compile(self, values: tuple[float, ...], inputs: Sequence[Input]) -> GraphFunction:
        floats = dict(zip(self.floats, values, strict=True))
        return compile_for(self.gm, inputs, self.options, self.platform, self.report, floats)

    def __call__(self, *args: Input) -> Outputs:
        values = self.values(args)
        if values not in self.compiled:
            with self.lock:
                if values not in self.compiled:
                    self.compiled[values] = self.recompile(values, args)
        return self.compiled[values](*args)

    def recompile(self, values: tuple[float, ...], args: Sequence[Input]) -> GraphFunction:
        """Compile for further values, outside of Dynamo. A result that needs new guards is
        discarded.
        """
        if len(self.compiled) >= MAX_FLOAT_VALUES:
            note = (
                f"a Python float took more than {MAX_FLOAT_VALUES} values: further ones run "
                "uncompiled"
            )
            self.report.notes.append(note)
            return runnable(self.gm, args).forward
        guards = num_guards(self.mode)
        try:
            with tracing_context(self.mode):
                made = self.compile(values, args)
        except Exception as error:  # the uncompiled graph always runs
            if self.options.strict:
                raise
            self.report.notes.append(f"floats {values} run uncompiled: {error}")
            return runnable(self.gm, args).forward
        if num_guards(self.mode) != guards:
            self.report.notes.append(
                f"floats {values} run uncompiled: compiling for them needs a new guard"
            )
            return runnable(self.gm, args).forward
        self.report.notes.append(f"compiled again for floats {values}")
        return made


def device_of(inputs: Sequence[Input]) -> str | None:
    """The device type of the first tensor."""
    return next(
        (x.device.type for x in inputs if isinstance(x, Tensor) and not x.is_meta and x.dim()), None
    )


def compile_for(
    gm: GraphModule,
    example_inputs: Sequence[Input],
    options: Options,
    platform: Platform,
    report: Report,
    floats: dict[int, float],
) -> GraphFunction:
    """One graph with given floats, compiled or from the cache, with the signature of `gm`."""
    context = Context(
        options, platform, inputs=example_inputs, keep_texts=options.report is not None
    )
    built = build(gm, example_inputs, context, report, floats)
    weights = weight_inputs(built.compiled, report.notes)
    made = built.wrap(with_weights(built.compiled, weights, example_inputs, report.notes))
    report.treated = True
    contract.check(report, options)
    if wants_cuda_graphs(options) and not platform.is_cpu:
        return Graphed(
            made, built.written, report.notes, report.cuda_graphs, settle=weights.refresh_packed
        )
    return made


def wants_cuda_graphs(options: Options) -> bool:
    """Whether the mode of torch.compile requests CUDA graphs."""
    return options.mode in ("reduce-overhead", "max-autotune")


def runnable(gm: GraphModule, example_inputs: Sequence[Input]) -> GraphModule:
    """Dynamo's graph, with regions inlined if `dynamic=True` passes them Python floats, which
    Inductor rejects, or if it has tensor subclasses, which AOTAutograd does not pass to them.
    """
    operands = [x for calls in regions_of(gm).values() for call in calls for x in call.args[2:]]
    floats = lifted_floats(gm.graph) or any(isinstance(x, float) for x in operands)
    if not operands or not (floats or subclass_reason(gm, example_inputs)):
        return gm
    copy = editable_copy(gm)
    inline_floats(copy)
    return copy
