"""Private API of torch's tracing: Dynamo, AOTAutograd, and symbolic sizes."""

import contextlib
import functools
import inspect
import itertools
import types
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeVar

import sympy
import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.exc import ShortenTraceback
from torch._dynamo.exc import TensorifyScalarRestartAnalysis as RestartAnalysis
from torch._dynamo.exc import TorchDynamoException as TracingError
from torch._dynamo.resume_execution import TORCH_DYNAMO_RESUME_IN_PREFIX
from torch._dynamo.source import (
    DictGetItemSource,
    LocalSource,
    TensorProperty,
    TensorPropertySource,
)
from torch._dynamo.utils import get_metrics_context
from torch._guards import TracingContext, tracing
from torch.autograd.grad_mode import _enter_inference_mode, _exit_inference_mode
from torch.fx import Graph, GraphModule, Node
from torch.fx._lazy_graph_module import _LazyGraphModule as LazyGraphModule
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.symbolic_shapes import (
    ShapeEnv,
    guard_or_false,
    statically_known_true,
    sym_eq,
)
from torch.fx.passes.shape_prop import _extract_tensor_metadata
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import bound_sympy

from atomc.errors import OURS
from atomc.torch_compat.core import (
    FakeTensor,
    FakeTensorMode,
    GraphFunction,
    Input,
    Outputs,
    autocast_is_on,
    modes_restored,
)

if TYPE_CHECKING:
    from torch._functorch._aot_autograd.schemas import ViewAndMutationMeta

P = ParamSpec("P")
T = TypeVar("T")

# Names of torch that other modules import from here, besides those defined below.
__all__ = [
    "RestartAnalysis",
    "ShapeEnv",
    "ShortenTraceback",
    "TracingError",
    "guard_or_false",
    "statically_known_true",
    "sym_eq",
]

mark_unbacked = torch._dynamo.decorators.mark_unbacked
INVOKE_SUBGRAPH = torch.ops.higher_order.invoke_subgraph


def source_name(placeholder: Node) -> str | None:
    """The source of an input, as a Python expression over the frame's locals: "L['x']". None if
    unknown.
    """
    source = getattr(placeholder, "_dynamo_source", None)
    if source is None:
        return None
    name = source.name
    return str(name() if callable(name) else name)


def argument_of(placeholder: Node) -> tuple[str, int | None] | None:
    """(name, None) if an input is an argument of the traced function, (name, dim) if it is the size
    of a dimension of one.

    An item of a dict argument, as of **kwargs, counts as an argument. None for any other input.
    """
    source, dim = getattr(placeholder, "_dynamo_source", None), None
    if isinstance(source, TensorPropertySource) and source.prop is TensorProperty.SIZE:
        dim, source = source.idx, source.base
    if isinstance(source, DictGetItemSource) and isinstance(source.base, LocalSource):
        return str(source.index), dim
    return (source.local_name, dim) if isinstance(source, LocalSource) else None


def runs_in_grad_mode(graph: Graph) -> bool:
    """Whether grad mode is on at any call of Dynamo's graph: as it is now, and then as the graph
    switches it. In inference mode it has no effect.
    """
    enabled, inference = torch.is_grad_enabled(), [torch.is_inference_mode_enabled()]
    for node in graph.nodes:
        if node.target is torch._C._set_grad_enabled:
            enabled = bool(node.args[0])
        elif node.target is _enter_inference_mode:
            inference.append(bool(node.args[0]))
        elif node.target is _exit_inference_mode:
            inference.pop()
        elif node.op.startswith("call_") and enabled and not inference[-1]:
            return True
    return False


def lifted_floats(graph: Graph) -> list[Node]:
    """Placeholders of Python floats that Dynamo lifted to 0-d inputs, without guards on their
    values.
    """
    return [node for node in graph.find_nodes(op="placeholder") if _is_lifted_float(node)]


def _is_lifted_float(placeholder: Node) -> bool:
    argument, fake = placeholder.meta.get("grapharg"), placeholder.meta.get("example_value")
    passed_as_tensor = getattr(argument, "pass_arg_as_tensor", False)
    return (
        passed_as_tensor
        and isinstance(fake, Tensor)
        and fake.dim() == 0
        and fake.dtype == torch.float64
    )


def break_reason(gm: GraphModule) -> tuple[str, list[tuple[str, int, str]]] | None:
    """Why Dynamo ended this graph early: (reason, [(file, line, code)], innermost last); None if it
    did not.
    """
    reason = getattr(gm, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return None
    return reason.reason, [(f.filename, f.lineno or 0, f.line or "") for f in reason.user_stack]


def recompile_reason() -> str | None:
    """The guard whose failure caused the compile under way; None if this is a first compile."""
    return get_metrics_context()._metrics.get("recompile_reason")


def compiled_function() -> str:
    """The qualified name of the function that Dynamo is compiling: "Block.forward", where Block is
    the class of the module, which may inherit the function; "" outside of a compile.
    """
    code = compiled_code()
    if code is None:
        return ""
    module = (_names_of_compile().get("locals") or {}).get("self")
    if isinstance(module, torch.nn.Module) and "<locals>" not in code.co_qualname:
        return f"{type(module).__qualname__}.{code.co_name}"
    return code.co_qualname


def compiled_code() -> types.CodeType | None:
    """The code that Dynamo is compiling; None outside of a compile."""
    code = _names_of_compile().get("code")
    return code if isinstance(code, types.CodeType) else None


def continued_line() -> str:
    """Behind which line the function begins that Dynamo is compiling, "file.py:12"; "" if it is no
    part of a function behind a graph break.
    """
    code = compiled_code()
    if code is None or not code.co_name.startswith(TORCH_DYNAMO_RESUME_IN_PREFIX):
        return ""
    return f"{code.co_filename.rsplit('/', 1)[-1]}:{code.co_firstlineno}"


_calls = itertools.count(1)
_NUMBER_OF_CALL = "atomc_number_of_call"


def number_of_call() -> int:
    """A number of the outermost call of a compiled function that is running."""
    frame, outermost = inspect.currentframe(), None
    while frame is not None:
        if frame.f_code.co_filename == torch._dynamo.eval_frame.__file__:
            outermost = frame
        frame = frame.f_back
    # A frame keeps names that its function does not have for as long as it runs.
    names: MutableMapping[str, Any] = outermost.f_locals if outermost is not None else {}
    if _NUMBER_OF_CALL not in names:
        names[_NUMBER_OF_CALL] = next(_calls)
    number: int = names[_NUMBER_OF_CALL]
    return number


def _names_of_compile() -> Mapping[str, Any]:
    """The local names of Dynamo's function that compiles a function; {} outside of a compile."""
    frame = inspect.currentframe()
    while frame is not None:
        code = frame.f_code
        if code.co_name == "_compile" and code.co_filename.endswith("convert_frame.py"):
            return frame.f_locals
        frame = frame.f_back
    return {}


@contextlib.contextmanager
def raised_unwrapped() -> Iterator[None]:
    """A context for a backend: errors of atomc raised inside leave torch.compile unwrapped.

    Dynamo wraps all exceptions except its own class ShortenTraceback, so they are raised as a
    subclass of it.
    """
    try:
        yield
    except OURS as error:
        if isinstance(error, ShortenTraceback):
            raise
        kind = type(error)
        both = type(
            kind.__name__,
            (ShortenTraceback, kind),
            {"__module__": kind.__module__, "__doc__": kind.__doc__},
        )
        raise both(str(error), first_useful_frame=None).with_traceback(
            error.__traceback__
        ) from error.__cause__


def editable_copy(gm: GraphModule) -> GraphModule:
    """A copy that may be edited: Dynamo reads its own graph again after the backend has returned.

    Its code is generated at the first call, not at each `recompile()`, since a graph that is only
    traced is not called.
    """
    graph = Graph()
    copies: dict[Node, Node] = {}
    graph.output(graph.graph_copy(gm.graph, copies))
    for node, copied in copies.items():
        if hasattr(node, "_dynamo_source"):
            copied._dynamo_source = node._dynamo_source
    old, new = gm.graph.output_node(), graph.output_node()
    new.meta = dict(old.meta)
    copy = LazyGraphModule(gm, graph)
    copy.meta = dict(gm.meta)
    if hasattr(gm, "_param_name_to_source"):
        copy._param_name_to_source = gm._param_name_to_source
    for name, child in gm.named_children():
        if isinstance(child, GraphModule) and hasattr(copy, name):  # a region
            setattr(copy, name, editable_copy(child))
    return copy


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
    """A context in which conditions on sizes are evaluated with hints, without adding guards."""
    with (
        mode.shape_env.suppress_guards() if mode.shape_env is not None else contextlib.nullcontext()
    ):
        yield


@contextlib.contextmanager
def tracing_context(mode: FakeTensorMode | None) -> Iterator[None]:
    """A tracing context of its own, so that a nested compile leaves the caller's untouched."""
    with tracing(TracingContext(mode)):
        yield


def with_fresh_code(function: Callable[P, T]) -> Callable[P, T]:
    """The function with a code object of its own, so that Dynamo never takes an earlier compile for
    this one.
    """
    return types.FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        None,
        function.__closure__,
    )


def nested_compile_region(function: Callable[P, T]) -> Callable[P, T]:
    """The function as a region that Dynamo traces once for all equal calls."""
    # since 2.12; Dynamo raises beyond it: more than the layers of any model
    limit = "max_reuse_entries"
    many = (
        {limit: 1024}
        if limit in inspect.signature(torch.compiler.nested_compile_region).parameters
        else {}
    )
    region: Callable[P, T] = torch.compiler.nested_compile_region(function, **many)  # type: ignore[arg-type]
    return region


def forget_region(function: Callable[P, T]) -> None:
    """Remove the attributes that `nested_compile_region` set on the function."""
    for name in [name for name in vars(function) if name.startswith("__marked_compile_region")]:
        delattr(function, name)


class Functional(NamedTuple):
    """The result of AOTAutograd for a graph.

    graph   the functional ATen graph
    around  the additional work of AOTAutograd in each call, None if there is none
    call    has the signature of the traced graph; calls `target` instead of `graph`
    """

    graph: GraphModule
    around: str | None
    call: GraphFunction
    target: "Target"


class Target:
    """A callable that is set later: AOTAutograd wraps the result of its compiler before the graph
    is compiled.
    """

    function: GraphFunction

    def __call__(self, *args: Input) -> Outputs:
        return self.function(*args)


def functional_graph(gm: GraphModule, fakes: Sequence[Input]) -> Functional:
    """The functional ATen graph of `gm`: AOTAutograd for inference, without decompositions; input
    mutations stay in it.
    """
    from torch._functorch._aot_autograd.utils import make_boxed_func
    from torch._functorch.aot_autograd import aot_module_simplified

    target = Target()
    graphs: list[tuple[GraphModule, str | None]] = []

    def inference_compiler(
        functional: GraphModule, inputs: Sequence[Input]
    ) -> Callable[[list[Input]], Input | Sequence[Input]]:
        graphs.append((functional, added_by_aot(functional, len(fakes))))
        return make_boxed_func(target)

    with torch._dynamo.utils.preserve_rng_state(), _no_memory_formats(), modes_restored():
        compile_boxed: Any = inference_compiler
        call = aot_module_simplified(
            gm,
            list(fakes),
            fw_compiler=compile_boxed,
            inference_compiler=compile_boxed,
            decompositions={},
            keep_inference_input_mutations=True,
        )
    return Functional(*graphs[0], call, target)


def added_by_aot(functional: GraphModule, num_inputs: int) -> str | None:
    """What AOTAutograd will do around the functional graph that it hands to its compiler; None if
    only call it.
    """
    context = TracingContext.try_get()
    meta = context.fw_metadata if context is not None else None
    if meta is None:
        return "AOTAutograd has no metadata of what it adds to the graph"
    if autocast_is_on():
        return "autocast is on"
    if meta.mutated_inp_runtime_indices or any(info.mutates_metadata for info in meta.input_info):
        return "an input is mutated after the graph"
    if meta.num_intermediate_bases or meta.tokens or meta.is_rng_op_functionalized:
        return "outputs are computed after the graph"
    if _returns_view_of_written(meta):
        return "an output is a view of an input that the graph writes"
    if any(type(info).__name__ != "PlainTensorMeta" for info in meta.subclass_inp_meta):
        return "an input is a tensor subclass"
    inputs, outputs = (
        functional.graph.find_nodes(op="placeholder"),
        functional.graph.output_node().args[0],
    )
    if (len(inputs), len(outputs)) != (num_inputs, len(meta.output_info)):  # type: ignore[arg-type]
        return "inputs or outputs are rearranged around the graph"
    return None


def _returns_view_of_written(meta: "ViewAndMutationMeta") -> bool:
    written = {i for i, info in enumerate(meta.input_info) if info.mutates_data}
    kinds = ("alias_of_input", "is_input")
    return any(
        info.base_idx in written for info in meta.output_info if info.output_type.name in kinds
    )


def guards_of(mode: FakeTensorMode | None, inputs: Sequence[Input]) -> str | None:
    """The guards on the sizes among the inputs so far, as an expression; None without sizes.

    A number that only chose a branch (a static cache with a window counts its tokens in one) has a
    symbol, too, but is no input. Dynamo checks such guards before each call.
    """
    sizes = _backed_sizes(inputs)
    if mode is None or mode.shape_env is None or not sizes:
        return None
    env = mode.shape_env
    symbols = {symbol for size in sizes for symbol in size.node.expr.free_symbols}
    of_sizes = [guard for guard in env.guards if env.simplify(guard.expr).free_symbols <= symbols]
    return env.produce_guards_expression(placeholders=sizes, guards=of_sizes)


def guards_hold(mode: FakeTensorMode | None, inputs: Sequence[Input], guards: str | None) -> bool:
    """Whether an expression of `guards_of` holds for these sizes; if so, it is added as a guard."""
    if guards is None:
        return True
    sizes = _backed_sizes(inputs)
    if mode is None or mode.shape_env is None or not sizes:
        return False
    hints = [size.node.hint for size in sizes]
    if not mode.shape_env.evaluate_guards_expression(guards, hints):
        return False
    return bool(mode.shape_env.evaluate_guards_expression(guards, sizes))


def _backed_sizes(inputs: Sequence[Input]) -> list[torch.SymInt]:
    return [x for x in inputs if isinstance(x, torch.SymInt) and x.node.has_hint()]


def size_facts(graph: Graph) -> list[str]:
    """The ranges of the symbols of Dynamo's graph, and its guards, as text."""
    mode = fake_mode_of(graph)
    if mode is None or mode.shape_env is None:
        return []
    env = mode.shape_env
    ranges = [f"{symbol}: {interval}" for symbol, interval in env.var_to_range.items()]
    return sorted([*ranges, *(str(guard.expr) for guard in env.guards)])


def bounds(graph: Graph, size: sympy.Expr) -> tuple[int, int | None]:
    """(smallest, largest) value of a size of Dynamo's graph, by the ranges of its symbols; None: no
    largest value.
    """
    mode = fake_mode_of(graph)
    if mode is None or mode.shape_env is None:
        return 0, None
    interval = bound_sympy(size, mode.shape_env.var_to_range)
    return max(int(interval.lower), 0), None if interval.upper in (int_oo, sympy.oo) else int(
        interval.upper
    )


def sizes_stay_symbolic() -> contextlib.AbstractContextManager[None]:
    """A context in which fake tensors use torch's Python kernels, as in AOTAutograd: C++ kernels
    specialize symbolic sizes, for example of padding."""
    context: contextlib.AbstractContextManager[None] = enable_python_dispatcher()
    return context


@contextlib.contextmanager
def _no_memory_formats() -> Iterator[None]:
    """A context in which traced nodes have no `memory_format` in their "tensor_meta". Nobody reads
    it, and with symbolic sizes it takes a third of the time of tracing to find.
    """
    names = vars(proxy_tensor)
    names["_extract_tensor_metadata"] = functools.partial(
        _extract_tensor_metadata, include_contiguity=False
    )
    try:
        yield
    finally:
        names["_extract_tensor_metadata"] = _extract_tensor_metadata


def new_unbacked_size(mode: FakeTensorMode) -> torch.SymInt:
    """An unbacked size, for an input that the traced program does not have."""
    assert mode.shape_env is not None
    with mode.shape_env.ignore_fresh_unbacked_symbols():
        return mode.shape_env.create_unbacked_symint()
