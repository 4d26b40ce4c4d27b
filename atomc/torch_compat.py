"""Everything of torch that is not public, in one place. Tested with torch 2.11 and 2.13."""

import contextlib
import functools
import inspect
import re
import subprocess
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import sympy
import torch
from torch import Tensor
from torch._C._autograd import _profiler_enabled as profiler_is_on
from torch._dynamo.exc import ShortenTraceback
from torch._dynamo.exc import TensorifyScalarRestartAnalysis as RestartAnalysis
from torch._dynamo.exc import TorchDynamoException as TracingError
from torch._dynamo.utils import get_metrics_context
from torch._guards import TracingContext, tracing
from torch._logging._internal import trace_log, trace_structured
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv, statically_known_true, sym_eq
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import bound_sympy
from torch.utils.weak import TensorWeakRef as WeakTensor

__all__ = [
    "INVOKE_SUBGRAPH",
    "FakeTensor",
    "FakeTensorMode",
    "RestartAnalysis",
    "ShapeEnv",
    "ShortenTraceback",
    "TracingError",
    "WeakTensor",
    "added_by_aot",
    "autocast_is_on",
    "bounds",
    "break_reason",
    "compiled_function",
    "fake_mode_of",
    "forget_region",
    "from_code",
    "functional_graph",
    "guards_hold",
    "guards_of",
    "inductor",
    "inductor_code",
    "inductor_option_names",
    "inductor_settings",
    "lifted_floats",
    "make_fx",
    "mark_unbacked",
    "mode_options",
    "nested_compile_region",
    "num_guards",
    "num_loaded",
    "num_owners",
    "outside_of_tracing",
    "own_copy",
    "profiler_is_on",
    "recompile_reason",
    "size_facts",
    "source_name",
    "statically_known_true",
    "structured_trace",
    "sym_eq",
    "traced_alone",
    "traces_structured",
    "tracing_context",
    "without_new_guards",
]

mark_unbacked = torch._dynamo.decorators.mark_unbacked
INVOKE_SUBGRAPH = torch.ops.higher_order.invoke_subgraph


def source_name(placeholder: Node) -> str | None:
    """Where Dynamo found this input, as a Python expression over the frame's locals: "L['x']". None if unknown."""
    source = getattr(placeholder, "_dynamo_source", None)
    if source is None:
        return None
    name = source.name
    return str(name() if callable(name) else name)


def lifted_floats(graph: Graph) -> list[Node]:
    """Placeholders that are Python floats which Dynamo made 0-d inputs of; it sets no guard on their values."""
    return [node for node in graph.find_nodes(op="placeholder") if _is_lifted_float(node)]


def _is_lifted_float(placeholder: Node) -> bool:
    argument, fake = placeholder.meta.get("grapharg"), placeholder.meta.get("example_value")
    passed_as_tensor = getattr(argument, "pass_arg_as_tensor", False)
    return passed_as_tensor and isinstance(fake, Tensor) and fake.dim() == 0 and fake.dtype == torch.float64


def break_reason(gm: GraphModule) -> tuple[str, list[tuple[str, int, str]]] | None:
    """Why Dynamo ended this graph early: (reason, [(file, line, code)], innermost last); None if it did not."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return None
    return reason.reason, [(f.filename, f.lineno or 0, f.line or "") for f in reason.user_stack]


def recompile_reason() -> str | None:
    """The guard whose failure caused the compile under way; None if this is a first compile."""
    return get_metrics_context()._metrics.get("recompile_reason")


def compiled_function() -> str:
    """The qualified name of the function that Dynamo is compiling: "Block.forward"; "" outside of a compile."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_name == "_compile" and frame.f_code.co_filename.endswith("convert_frame.py"):
            code = frame.f_locals.get("code")
            return code.co_qualname if isinstance(code, types.CodeType) else ""
        frame = frame.f_back
    return ""


def own_copy(gm: GraphModule) -> GraphModule:
    """A copy that may be edited: Dynamo reads its own graph again after the backend has returned."""
    graph = Graph()
    copies: dict[Node, Node] = {}
    graph.output(graph.graph_copy(gm.graph, copies))
    for node, copied in copies.items():
        if hasattr(node, "_dynamo_source"):
            copied._dynamo_source = node._dynamo_source
    old, new = gm.graph.output_node(), graph.output_node()
    new.meta = dict(old.meta)
    made = GraphModule(gm, graph)
    made.meta = dict(gm.meta)
    if hasattr(gm, "_param_name_to_source"):
        made._param_name_to_source = gm._param_name_to_source
    for name, child in gm.named_children():
        if isinstance(child, GraphModule) and hasattr(made, name):  # a region
            setattr(made, name, own_copy(child))
    return made


def fake_mode_of(graph: Graph) -> FakeTensorMode | None:
    """The mode under which Dynamo or AOTAutograd traced this graph."""
    context = TracingContext.try_get()
    if context is not None and context.fake_mode is not None:
        return context.fake_mode
    for node in graph.nodes:
        value = node.meta.get("val", node.meta.get("example_value"))
        if isinstance(value, FakeTensor):
            return value.fake_mode
    return None


def num_guards(mode: FakeTensorMode | None) -> int:
    """How many guards the shape environment holds; a pass must not add any."""
    return len(mode.shape_env.guards) if mode is not None and mode.shape_env is not None else 0


@contextlib.contextmanager
def without_new_guards(mode: FakeTensorMode) -> Iterator[None]:
    """What is asked about sizes here is answered from the example's and remembered by no guard."""
    with mode.shape_env.suppress_guards() if mode.shape_env is not None else contextlib.nullcontext():
        yield


def num_owners(tensor: Tensor) -> int:
    """How many tensors share this tensor's storage."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)) - 1  # one is the storage just asked for


@contextlib.contextmanager
def tracing_context(mode: FakeTensorMode | None) -> Iterator[None]:
    """A tracing context of its own, so that a nested compile leaves the caller's untouched."""
    with tracing(TracingContext(mode)):
        yield


def nested_compile_region(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as a region that Dynamo traces once for all calls alike."""
    limit = "max_reuse_entries"  # since 2.12; beyond it Dynamo raises, so let it be more than the layers of any model
    many = {limit: 1024} if limit in inspect.signature(torch.compiler.nested_compile_region).parameters else {}
    made: Callable[..., Any] = torch.compiler.nested_compile_region(function, **many)  # type: ignore[arg-type]
    return made


def forget_region(function: Callable[..., Any]) -> None:
    """Take away what `nested_compile_region` wrote on the function."""
    for name in [name for name in vars(function) if name.startswith("__marked_compile_region")]:
        delattr(function, name)


def functional_graph(
    gm: GraphModule,
    fakes: Sequence[Any],
    compiler: Callable[[GraphModule, Sequence[Any]], Callable[..., Any]],
) -> Callable[..., Any]:
    """Run AOTAutograd for inference without decompositions and let `compiler` compile the functional ATen graph.

    Input mutations stay in the graph. The result takes and returns what `gm` does.
    """
    from torch._functorch._aot_autograd.utils import make_boxed_func
    from torch._functorch.aot_autograd import aot_module_simplified

    def inference_compiler(functional: Any, inputs: Any) -> Any:
        return make_boxed_func(compiler(functional, inputs))

    with torch._dynamo.utils.preserve_rng_state():
        compile_boxed: Any = inference_compiler
        return aot_module_simplified(
            gm, list(fakes), fw_compiler=compile_boxed, inference_compiler=compile_boxed,
            decompositions={}, keep_inference_input_mutations=True,
        )  # fmt: skip


def inductor(gm: GraphModule, inputs: Sequence[Any], patches: Mapping[str, Any] | None = None) -> Callable[..., Any]:
    """Compile a graph with Inductor, as its own backend would; `patches` are keys of torch._inductor.config."""
    from torch._inductor.compile_fx import compile_fx

    compiled: Any = compile_fx(gm, list(inputs), config_patches=dict(patches or {}))
    return compiled  # type: ignore[no-any-return]


@dataclass(frozen=True)
class InductorCode:
    """What Inductor made of a graph: a Python module with `call(inputs: list) -> outputs`.

    constants  attributes of the module
    checked    numbers of the inputs that are copied if they do not lie aligned; `written` of those written in place
    """

    source: str
    constants: dict[str, Tensor]
    checked: list[int]
    written: list[int]


def inductor_code(
    gm: GraphModule, inputs: Sequence[Any], patches: Mapping[str, Any]
) -> tuple[Callable[..., Any], InductorCode | str]:
    """As `inductor`, for a graph without gradients; also the code, or why the code is not all that runs."""
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    made: list[tuple[Any, InductorCode | str]] = []
    returns_tuple = isinstance(gm.graph.output_node().args[0], tuple | list)  # Inductor makes it one

    def remembering(inner: GraphModule, examples: Sequence[Any], **kwargs: Any) -> Any:
        reason = added_by_aot(inner, len(inputs))
        out = compile_fx_inner(inner, examples, **kwargs)
        made.append((out, reason or _code_of(out)))
        return out

    compiled: Any
    # A graph from AOTAutograd's own cache would come without its code.
    with torch._functorch.config.patch(enable_autograd_cache=False):
        compiled = compile_fx(gm, list(inputs), inner_compile=remembering, config_patches=_spared(patches))
    if len(made) != 1:
        return compiled, f"Inductor made {len(made)} functions of one graph"
    out, code = made[0]
    if isinstance(code, str):
        return compiled, code
    return _unboxed(out, returns_tuple), code


def _code_of(compiled: Any) -> InductorCode | str:
    from torch._inductor.output_code import CompiledFxGraph

    if type(compiled) is not CompiledFxGraph:
        return f"Inductor made a {type(compiled).__name__}"
    if compiled.cudagraph_info is not None or compiled.frozen_param_names or compiled.torchbind_constants:
        return "Inductor's own CUDA graphs, frozen parameters or script objects are in it"
    if torch._inductor.config.cpp_wrapper:
        return "Inductor's cpp_wrapper is on"
    written = list(compiled.mutated_input_idxs)
    checked = list(compiled.inputs_to_check)
    if getattr(compiled, "_defers_input_alignment", False):  # since 2.13 the code sees to the others
        checked = [i for i in checked if i in written]
    return InductorCode(_needed(compiled.source_code), dict(compiled.constants or {}), checked, written)


def _needed(source: str) -> str:
    """Inductor's code without what it imports of Inductor and does not use: half of the time that loading it takes."""
    imported = re.compile(r"^from torch\._inductor\.[\w.]+ import (?:\w+ as )?(\w+)\n", re.MULTILINE)
    return imported.sub(lambda line: line[0] if len(re.findall(rf"\b{line[1]}\b", source)) > 1 else "", source)


def from_code(code: InductorCode, returns_tuple: bool, patches: Mapping[str, Any]) -> Callable[..., Any]:
    """The function that `inductor_code` returned with this code, in another process."""
    from torch._inductor.codecache import PyCodeCache
    from torch._inductor.utils import align_inputs_from_check_idxs
    from torch.utils._ordered_set import OrderedSet

    with torch._inductor.config.patch(_spared(patches)):
        key, path = PyCodeCache.write(code.source)
        call = PyCodeCache.load_by_key_path(key, path, attrs=code.constants).call
    return _unboxed(align_inputs_from_check_idxs(call, code.checked, OrderedSet(code.written)), returns_tuple)


def _spared(patches: Mapping[str, Any]) -> dict[str, Any]:
    """The patches, and what spares Inductor 8 s of building and loading a library for each vector extension."""
    known = _vectors_work() and torch._inductor.config.cpp.vec_isa_ok is None
    return {"cpp.vec_isa_ok": True, **patches} if known else dict(patches)


@functools.cache
def _vectors_work() -> bool:
    """Whether torch was built for this CPU's vectors, and the compiler takes the flags of all that the CPU has."""
    if not sys.platform.startswith("linux") or torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    from torch._inductor import cpu_vec_isa

    has = set(cpu_vec_isa.x86_isa_checker())
    flags = [isa.build_arch_flags() for isa in cpu_vec_isa.supported_vec_isa_list if {*str(isa).split()} <= has]
    if not _takes(" ".join(flags)):
        return False

    def quickly(isa: Any, code: str) -> bool:
        return _takes(isa.build_arch_flags())

    # What is asked here is remembered.
    with patch.object(cpu_vec_isa.VecISA, "check_build", quickly), torch._inductor.config.patch({"cpp.vec_isa_ok": True}):
        cpu_vec_isa.valid_vec_isa_list()
    return True


def _takes(flags: str) -> bool:
    """Whether the C++ compiler knows these flags, and with them their intrinsics."""
    from torch._inductor.cpp_builder import get_cpp_compiler

    command = [get_cpp_compiler(), *flags.split(), "-fsyntax-only", "-x", "c++", "-"]
    return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True).returncode == 0


def _unboxed(call: Callable[[list[Any]], Any], returns_tuple: bool) -> Callable[..., Any]:
    if returns_tuple:
        return lambda *args: call(list(args))
    return lambda *args: call(list(args))[0]


def added_by_aot(functional: GraphModule, num_inputs: int) -> str | None:
    """What AOTAutograd will do around the functional graph that it hands to its compiler; None if only call it."""
    context = TracingContext.try_get()
    meta = context.fw_metadata if context is not None else None
    if meta is None:
        return "AOTAutograd does not say what it adds to the graph"
    if autocast_is_on():
        return "autocast is on"
    if meta.mutated_inp_runtime_indices or any(info.mutates_metadata for info in meta.input_info):
        return "an input is changed behind the graph"
    if meta.num_intermediate_bases or meta.tokens or meta.is_rng_op_functionalized:
        return "outputs are made behind the graph"
    if any(type(info).__name__ != "PlainTensorMeta" for info in meta.subclass_inp_meta):
        return "an input is a tensor subclass"
    num_outputs = len(functional.graph.output_node().args[0])  # type: ignore[arg-type]
    if len(functional.graph.find_nodes(op="placeholder")) != num_inputs or num_outputs != len(meta.output_info):
        return "inputs or outputs are rearranged around the graph"
    return None


def guards_of(mode: FakeTensorMode | None, inputs: Sequence[Any]) -> str | None:
    """What compiling has found out about the sizes among the inputs so far, as an expression; None if nothing."""
    sizes = _backed_sizes(inputs)
    if mode is None or mode.shape_env is None or not sizes:
        return None
    return mode.shape_env.produce_guards_expression(placeholders=sizes)


def guards_hold(mode: FakeTensorMode | None, inputs: Sequence[Any], guards: str | None) -> bool:
    """Whether an expression of `guards_of` holds for these sizes; if so, it is a guard from now on."""
    if guards is None:
        return True
    sizes = _backed_sizes(inputs)
    if mode is None or mode.shape_env is None or not sizes:
        return False
    hints = [size.node.hint for size in sizes]
    if not mode.shape_env.evaluate_guards_expression(guards, hints):
        return False
    return bool(mode.shape_env.evaluate_guards_expression(guards, sizes))


def _backed_sizes(inputs: Sequence[Any]) -> list[torch.SymInt]:
    return [x for x in inputs if isinstance(x, torch.SymInt) and x.node.has_hint()]


def size_facts(graph: Graph) -> list[str]:
    """What is known about the sizes in a graph of Dynamo's: the ranges of its symbols, and guards."""
    mode = fake_mode_of(graph)
    if mode is None or mode.shape_env is None:
        return []
    env = mode.shape_env
    ranges = [f"{symbol}: {found}" for symbol, found in env.var_to_range.items()]
    return sorted([*ranges, *(str(guard.expr) for guard in env.guards)])


def bounds(graph: Graph, size: sympy.Expr) -> sympy.Interval:
    """Between what numbers a size of a graph of Dynamo's lies, by the ranges of its symbols, which guards hold."""
    mode = fake_mode_of(graph)
    if mode is None or mode.shape_env is None:
        return sympy.Interval(0, sympy.oo)
    found = bound_sympy(size, mode.shape_env.var_to_range)
    upper = sympy.oo if found.upper in (int_oo, sympy.oo) else found.upper
    return sympy.Interval(max(found.lower, 0), upper)


def inductor_settings() -> str:
    """Inductor's configuration of this process, in a form that can be compared."""
    import torch._inductor.config

    return repr(sorted(torch._inductor.config.save_config_portable().items(), key=str))


def autocast_is_on() -> bool:
    """Whether ops convert their arguments, on whatever device."""
    return bool(torch._C._is_any_autocast_enabled())


def num_loaded() -> int:
    """How many graphs Inductor has loaded from its cache, instead of compiling them, since the process began."""
    return int(torch._dynamo.utils.counters["inductor"]["fxgraph_cache_hit"])


def mode_options(mode: str) -> dict[str, Any]:
    """What torch.compile(mode=...) means to Inductor."""
    import torch._inductor

    return dict(torch._inductor.list_mode_options(mode)) if mode != "default" else {}


def inductor_option_names() -> list[str]:
    """The options that Inductor knows."""
    import torch._inductor

    return list(torch._inductor.list_options())



@contextlib.contextmanager
def outside_of_tracing() -> Iterator[None]:
    """Real tensors and no tracing context, whatever is being compiled around this call."""
    with tracing(None), unset_fake_temporarily(), torch.inference_mode(False), torch.no_grad():
        yield


def traced_alone(function: Callable[..., Any], *args: Tensor) -> Graph:
    """The graph of a function with symbolic sizes, equal ones under one symbol."""
    with outside_of_tracing():
        mode = FakeTensorMode(shape_env=ShapeEnv())
        mode.cache_enabled = False  # entries of symbolic sizes are dear to make, and none is used twice
        fakes = [mode.from_tensor(given) for given in args]
        return make_fx(function, tracing_mode="fake")(*fakes).graph


def fresh_size(mode: FakeTensorMode) -> torch.SymInt:
    """A size about which nothing is known, for an input that the traced program did not have."""
    assert mode.shape_env is not None
    with mode.shape_env.ignore_fresh_unbacked_symbols():
        return mode.shape_env.create_unbacked_symint()


def traces_structured() -> bool:
    """Whether somebody listens to torch's structured trace. (Its own handler leaves at the first line if nobody does.)"""
    return bool(trace_log.handlers)


def structured_trace(name: str, text: Callable[[], str]) -> None:
    """Write a text to torch's structured trace, under the compile that is going on."""
    trace_structured("artifact", metadata_fn=lambda: {"name": name, "encoding": "string"}, payload_fn=text,
                     expect_trace_id=False)  # fmt: skip


def is_static_input(x: Tensor) -> bool:
    """Whether a graph input stays where it is: a parameter, a buffer, or what mark_static_address marked."""
    return isinstance(x, torch.nn.Parameter) or getattr(x, "_dynamo_static_input_type", None) is not None
