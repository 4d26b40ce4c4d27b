"""What torch.compile(model, backend="atom") calls: a graph goes in, a callable comes out.

    lift > trace (AOTAutograd) > passes > lower, per range of token counts > glue
"""

import copy
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from atomc import capture, passes, pipeline, ranges
from atomc.cudagraphs import Graphed
from atomc.dump import Dumper
from atomc.errors import OptionsError, RunError
from atomc.floats import inline_floats
from atomc.graph_pass import Context, Extra
from atomc.match import mutated
from atomc.ops.state import StateSpec
from atomc.options import Options
from atomc.packs import Packs
from atomc.pieces import compile_glue, glue_of, run_eagerly
from atomc.platform import Platform
from atomc.provenance import clean_path, layer_of
from atomc.report import GraphBreak, Report, forget, keep
from atomc.select import Selection
from atomc.stamp import region, regions_of, renamed, stack_of
from atomc.torch_compat import (
    RestartAnalysis,
    ShortenTraceback,
    break_reason,
    compiled_function,
    fake_mode_of,
    inductor,
    inductor_option_names,
    lifted_floats,
    mode_options,
    num_guards,
    outside_of_tracing,
    own_copy,
    recompile_reason,
    tracing_context,
)

log = logging.getLogger("atomc")

# A float that takes more values than this is handed to Inductor as an input.
MOST_FLOAT_VALUES = 8


def atom(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | Options | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """The backend. Raises OptionsError for wrong options; whatever else goes wrong, the graph runs through Inductor."""
    chosen = Options.of(options, mode)
    _check_inductor_options(chosen)
    return compile_graph(gm, example_inputs, chosen)


@dataclass
class Compiled:
    """One graph after all stages. `call` takes the graph's inputs, then `packed`, then the state inputs, then `extras`.

    inputs   the names of all of these but the extras
    packed   name -> the names of the parameters that the caller packs
    """

    call: Callable[..., Any]
    graph: GraphModule
    inputs: list[str]
    packed: dict[str, tuple[str, ...]]
    state: list[StateSpec] = field(default_factory=list)
    extras: list[Extra] = field(default_factory=list)
    syncing: list[str] = field(default_factory=list)  # kernels that no CUDA graph can hold


def compile_graph(
    gm: GraphModule, example_inputs: Sequence[Any], options: Options, platform: Platform | None = None
) -> Callable[..., Any]:
    """Compile one graph of Dynamo's, or say in the report why Inductor does."""
    report = keep(new_report(gm))
    reason = untreatable(example_inputs, options)
    if reason:
        return to_inductor(gm, example_inputs, options, report, reason)
    if any(isinstance(x, Tensor) and x.is_meta for x in example_inputs):
        raise RunError("the model is on the meta device and cannot run: load its weights, or use atomc.explain(model, ...)")
    try:
        return _Specialized(gm, example_inputs, options, platform, report).first()
    except RestartAnalysis:  # Dynamo traces again with floats it now knows to be constants
        forget(report)
        raise
    except ShortenTraceback:
        raise
    except Exception as error:  # a compiler that fails must not break the program
        report.treated, report.why_not = False, f"{type(error).__name__}: {error}"
        if options.strict:
            raise
        log.warning("atomc could not compile a graph of %s and hands it to Inductor: %s", report.model, error)
        return to_inductor(gm, example_inputs, options, report, report.why_not)


def new_report(gm: GraphModule) -> Report:
    """A report that knows the model, the graph break after the graph and the guard that caused the recompile."""
    report = Report(model_name(gm))
    broken = break_reason(gm)
    if broken is not None:
        reason, stack = broken
        file, line, code = stack[-1] if stack else ("", 0, "")
        report.graph_break = GraphBreak(f"{file.rsplit('/', 1)[-1]}:{line}", code.strip(), reason.split("\n")[0].strip())
    report.recompile = recompile_reason()
    return report


def model_name(gm: GraphModule) -> str:
    """The class whose forward Dynamo compiles, else the outermost module in the graph."""
    owner, _, name = compiled_function().rpartition(".")
    if name == "forward" and "<locals>" not in owner.rpartition(".")[2]:
        return owner.rpartition(".")[2]
    for node in gm.graph.nodes:
        stack = node.meta.get("nn_module_stack")
        if stack:
            path, kind = next(iter(stack.values()))
            name = kind if isinstance(kind, str) else kind.__qualname__
            return name.rsplit(".", 1)[-1] or clean_path(path)
    return "function"


def untreatable(example_inputs: Sequence[Any], options: Options) -> str | None:
    """Why this graph is Inductor's from the start."""
    if options.disable:
        return "atomc is disabled (ATOMC_DISABLE=1 or options={'disable': True})"
    if torch.is_grad_enabled() and capture.wants_gradients(example_inputs):
        _warn_about_training()
        return ("gradients are enabled and a parameter or input requires them: this is a training graph; "
                "run under torch.inference_mode() or call model.requires_grad_(False)")  # fmt: skip
    return None


_warned = threading.Event()


def _warn_about_training() -> None:
    if not _warned.is_set():
        _warned.set()
        log.warning("atomc compiles for inference only: this graph wants gradients and goes to Inductor. "
                    "Run it under torch.inference_mode(), or call model.requires_grad_(False).")  # fmt: skip


def to_inductor(
    gm: GraphModule, example_inputs: Sequence[Any], options: Options, report: Report, reason: str
) -> Callable[..., Any]:
    """Hand Dynamo's graph to Inductor as its own backend would."""
    report.treated, report.why_not = False, reason
    gm = runnable(gm)
    with timed(report, "inductor"):
        return inductor(gm, example_inputs, inductor_patches(options))


def runnable(gm: GraphModule) -> GraphModule:
    """Dynamo's graph, without regions if `dynamic=True` hands them Python floats, which they refuse."""
    operands = [x for calls in regions_of(gm).values() for call in calls for x in call.args[2:]]
    if not operands or not (lifted_floats(gm.graph) or any(isinstance(x, float) for x in operands)):
        return gm
    copy = own_copy(gm)
    inline_floats(copy)
    return copy


def inductor_patches(options: Options) -> dict[str, Any]:
    """Inductor's configuration for these options."""
    patches = {name: on for name, on in mode_options(options.mode).items() if "cudagraph" not in name}
    if options.rounding == "hf":
        patches["emulate_precision_casts"] = True
    return {**patches, **options.inductor}


def _check_inductor_options(options: Options) -> None:
    if options.inductor:
        known = set(inductor_option_names())
        unknown = sorted(name for name in options.inductor if name.replace("-", "_") not in known)
        if unknown:
            raise OptionsError(f"option inductor: Inductor has no option {unknown[0]!r}; torch._inductor.list_options() "
                               "lists what it has")  # fmt: skip


@contextmanager
def timed(report: Report, phase: str) -> Any:
    start = time.perf_counter()
    try:
        yield
    finally:
        report.phases[phase] = report.phases.get(phase, 0.0) + time.perf_counter() - start


class _Specialized:
    """Compiles one graph, once per tuple of the Python floats that Dynamo made inputs of without guarding them."""

    def __init__(
        self, gm: GraphModule, example_inputs: Sequence[Any], options: Options, platform: Platform | None,
        report: Report,
    ):  # fmt: skip
        self.gm, self.inputs, self.options, self.report = gm, list(example_inputs), options, report
        self.platform = platform or Platform.detect(device_of(example_inputs))
        placeholders = gm.graph.find_nodes(op="placeholder")
        self.floats = [placeholders.index(node) for node in lifted_floats(gm.graph)]
        self.mode = fake_mode_of(gm.graph)
        self.compiled: dict[tuple[float, ...], Callable[..., Any]] = {}
        self.lock = threading.Lock()

    def first(self) -> Callable[..., Any]:
        values = self.values(self.inputs)
        self.compiled[values] = self.compile(values, self.inputs)
        if not self.floats:
            return self.compiled[values]
        self.inputs = []  # they are the caller's to free
        return self

    def values(self, args: Sequence[Any]) -> tuple[float, ...]:
        return tuple(float(args[i]) for i in self.floats)

    def compile(self, values: tuple[float, ...], inputs: Sequence[Any]) -> Callable[..., Any]:
        floats = dict(zip(self.floats, values, strict=True))
        return compile_for(self.gm, inputs, self.options, self.platform, self.report, floats)

    def __call__(self, *args: Any) -> Any:
        values = self.values(args)
        if values not in self.compiled:
            with self.lock:
                if values not in self.compiled:
                    self.compiled[values] = self.recompile(values, args)
        return self.compiled[values](*args)

    def recompile(self, values: tuple[float, ...], args: Sequence[Any]) -> Callable[..., Any]:
        """Compile for further values, outside of Dynamo: sizes may not be guarded any more, so a guard undoes it."""
        if len(self.compiled) >= MOST_FLOAT_VALUES:
            self.report.notes.append(f"a Python float took more than {MOST_FLOAT_VALUES} values: those run uncompiled")
            return runnable(self.gm).forward
        guards = num_guards(self.mode)
        try:
            with tracing_context(self.mode):
                made = self.compile(values, args)
        except Exception as error:  # the graph itself always runs
            if self.options.strict:
                raise
            self.report.notes.append(f"floats {values} run uncompiled: {error}")
            return runnable(self.gm).forward
        if num_guards(self.mode) != guards:
            self.report.notes.append(f"floats {values} run uncompiled: compiling for them needs a new guard")
            return runnable(self.gm).forward
        self.report.notes.append(f"compiled again for floats {values}")
        return made


def device_of(inputs: Sequence[Any]) -> str | None:
    """The device type of the first tensor."""
    return next((x.device.type for x in inputs if isinstance(x, Tensor) and not x.is_meta and x.dim()), None)


def compile_for(
    gm: GraphModule, example_inputs: Sequence[Any], options: Options, platform: Platform, report: Report,
    floats: dict[int, float],
) -> Callable[..., Any]:  # fmt: skip
    """All stages for one graph with given floats; takes and returns what `gm` does."""
    context = Context(options, platform, notes=report.notes, inputs=example_inputs)
    dumper = Dumper(options.dump)
    written: list[int] = []

    def compiler(functional: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        written.extend(written_inputs(functional))
        compiled = stages(functional, context, report, dumper)
        return with_extras(compiled, example_inputs, report.notes)

    def lift(dynamo: GraphModule) -> None:
        lift_stage(dynamo, context, report)

    start = time.perf_counter()
    made = capture.trace(gm, example_inputs, lift, compiler, floats, report.notes)
    report.phases["trace"] = time.perf_counter() - start - sum(
        report.phases.get(name, 0.0) for name in ("lift", "passes", "lower", "glue"))  # fmt: skip
    report.treated = True
    if wants_cuda_graphs(options) and not platform.is_cpu:
        return Graphed(made, written, report.notes, report.cuda_graphs)
    return made


def wants_cuda_graphs(options: Options) -> bool:
    """The modes of torch.compile that ask for CUDA graphs."""
    return options.mode in ("reduce-overhead", "max-autotune")


def written_inputs(gm: GraphModule) -> list[int]:
    """The numbers of the inputs that the graph writes in place."""
    targets = {target for node in gm.graph.nodes for target in mutated(node)}
    return [i for i, node in enumerate(gm.graph.find_nodes(op="placeholder")) if node in targets]


def lift_stage(dynamo: GraphModule, context: Context, report: Report) -> None:
    """Lift composite calls of Dynamo's graph, in place: of a region once, in the report for each of its calls."""
    with timed(report, "lift"):
        pipeline.run(dynamo, [passes.LIFT], context, report)
        for name, calls in regions_of(dynamo).items():
            once = Report(report.model)
            lift_stage(region(dynamo, name), context, once)
            report.stages += once.stages
            for call in calls:
                report.matches += once.matches
                for site in once.sites:
                    path = renamed(site.module_path, stack_of(calls[0]), stack_of(call))
                    report.sites.append(replace(site, module_path=path, layer=layer_of(path)))


def stages(
    gm: GraphModule, context: Context, report: Report, dumper: Dumper, *, glue: bool = True
) -> Compiled:
    """Passes, lowering per range, and glue for a functional graph. Without glue, `call` is the original's forward."""
    chosen, report.off = pipeline.selected(passes.PIPELINE, context)
    with timed(report, "passes"):
        dumper(gm, "captured")
        pipeline.run(gm, chosen, context, report, [lambda name, graph: dumper(graph, name)])
    inputs = gm.graph.find_nodes(op="placeholder")
    packed = {node.name: node.meta["packed"] for node in inputs if "packed" in node.meta}
    names = [node.name for node in inputs]
    how, why = glue_of(context.options, context.platform)
    report.notes.append(f"glue: {how} ({why})")
    callables, layout = [], None
    selection = Selection(context.options, context.platform, eager=how == "eager")  # loads the kernels
    found = ranges.ranges_of(gm, selection.could_serve)
    extras: list[Extra] = []
    syncing: list[str] = []
    for interval in found:
        with timed(report, "lower"):
            lowered = copy_graph(gm) if len(found) > 1 else gm
            selection = Selection(context.options, context.platform, eager=how == "eager", layout=layout,
                                  tokens=interval)  # fmt: skip
            layout = layout or selection.fix_layout(list(lowered.graph.nodes))
            for_range = copy.copy(context)
            for_range.choose, for_range.extras = selection.choose, []
            pipeline.run(lowered, [passes.LOWER], for_range, report, [lambda name, graph: dumper(graph, name)])
            report.kernels += selection.choices
            syncing += selection.syncing
        with timed(report, "glue"):
            call = _glue(lowered, how, context.options, report) if glue else gm.forward
            offset = len(lowered.graph.find_nodes(op="placeholder")) - len(for_range.extras)
            callables.append(_taking(call, offset, len(extras), len(for_range.extras)) if len(found) > 1 else call)
            extras += for_range.extras
    state = [replace(spec, layout=layout or spec.layout) for spec in context.state]
    report.state = [f"{spec.name}: {spec.kind} {list(spec.shape)} {spec.dtype} layout {spec.layout}" for spec in state]
    return Compiled(ranges.dispatch(gm, found, callables), gm, names, packed, state, extras, syncing)


def _taking(call: Callable[..., Any], inputs: int, start: int, count: int) -> Callable[..., Any]:
    """The callable of one range sees only its own extras."""
    return lambda *args: call(*args[:inputs], *args[inputs + start:inputs + start + count])


def _glue(gm: GraphModule, how: str, options: Options, report: Report) -> Callable[..., Any]:
    if how == "eager":
        return run_eagerly(gm)
    call, pieces = compile_glue(gm, inductor_patches(options))
    report.notes.append(f"{pieces} pieces compiled by Inductor")
    return call


def copy_graph(gm: GraphModule) -> GraphModule:
    """The same graph again, to be lowered for another range; values and metadata are shared."""
    graph = torch.fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    return GraphModule(gm, graph)


def with_extras(compiled: Compiled, example_inputs: Sequence[Any], notes: list[str]) -> Callable[..., Any]:
    """Append the packs, and what kernels prepared of the weights, to each call."""
    if not compiled.packed and not compiled.extras:
        return compiled.call
    packs = packs_of(compiled, notes)
    appended = prepared(compiled, [*example_inputs, *packs(example_inputs)])
    return lambda *args: compiled.call(*args, *packs(args), *appended)


def packs_of(compiled: Compiled, notes: list[str]) -> Packs:
    """The packs that the graph reads, found among its inputs."""
    return Packs([[compiled.inputs.index(part) for part in parts] for parts in compiled.packed.values()], notes)


def prepared(compiled: Compiled, weights: Sequence[Any]) -> list[tuple[Tensor, ...]]:
    """What kernels made of the weights, which are inputs or packs, in the order of the extras."""
    made = []
    for extra in compiled.extras:
        if extra.kind != "prepared":
            raise ValueError(f"a kernel's {extra.kind} exists in the runtime only")
        with outside_of_tracing():
            made.append(extra.function(weights[compiled.inputs.index(extra.weight)]).tensors)
    return made
