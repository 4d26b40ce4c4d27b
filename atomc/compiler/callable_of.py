"""One graph from Dynamo as the callable that torch.compile gets."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import SymInt, Tensor
from torch.fx import GraphModule

from atomc.cache.compiled import append_weights, weight_inputs
from atomc.capture.floats import inline_floats
from atomc.capture.inline_regions import regions_of
from atomc.capture.subclasses import subclass_reason
from atomc.capture.variable_floats import constant_floats
from atomc.compiler.driver import build
from atomc.compiler.host_integers import compute_on_host
from atomc.compiler.number_tensors import number_tensors
from atomc.options import Options
from atomc.platform import Platform
from atomc.replay.cudagraphs import Graphed
from atomc.replay.repeatable import repeats_calls
from atomc.replay.repeated import Repeated
from atomc.report import contract
from atomc.report.report import Report
from atomc.rewriting.graph_pass import Context
from atomc.torch_compat.core import GraphFunction, Input
from atomc.torch_compat.float_inputs import floats_stay_inputs
from atomc.torch_compat.tracing import editable_copy, fake_mode_of, lifted_floats


def device_of(inputs: Sequence[Input]) -> str | None:
    """The device type of the first tensor."""
    return next(
        (x.device.type for x in inputs if isinstance(x, Tensor) and not x.is_meta and x.dim()), None
    )


def callable_of(
    gm: GraphModule,
    example_inputs: Sequence[Input],
    options: Options,
    platform: Platform | None,
    report: Report,
) -> GraphFunction:
    """A graph, compiled or from the cache, with the signature of `gm`.

    Raises RestartAnalysis if Dynamo has to trace again with further floats as constants.
    """
    platform = platform or Platform.detect(device_of(example_inputs))
    gm, example_inputs, wrap = number_tensors(gm, example_inputs)
    context = Context(
        options, platform, inputs=example_inputs, keep_texts=options.report is not None
    )
    floats = constant_floats(gm, example_inputs)
    with floats_stay_inputs(fake_mode_of(gm.graph)):
        built = build(gm, context, report, floats)
    compiled = built.compiled
    if repeats_calls(options, platform, report, compiled.syncing):
        repeated = Repeated(
            compiled.call,
            torch.device(compiled.ranges.device or "cpu"),
            _is_dynamic(example_inputs),
            report.notes,
            report.repeated,
            options.strict,
        )
        compiled = replace(compiled, call=repeated)
    weights = weight_inputs(compiled, report.notes)
    function = built.wrap(append_weights(compiled, weights, example_inputs, report.notes))
    report.treated = True
    contract.check(report, options)
    if wants_cuda_graphs(options) and not platform.is_cpu:
        function = Graphed(
            function, built.written, report.notes, report.cuda_graphs, settle=weights.refresh_packed
        )
    return wrap(compute_on_host(gm, function))


def _is_dynamic(example_inputs: Sequence[Input]) -> bool:
    """Whether some size or number of the inputs is symbolic."""
    sizes = [x.shape if isinstance(x, Tensor) else (x,) for x in example_inputs]
    return any(isinstance(size, SymInt) for shape in sizes for size in shape)


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
