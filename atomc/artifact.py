"""Compiled functions as plain data: the Python that torch.fx and Inductor made, and the names of what that calls.

Plain data are dicts, lists, tuples, numbers, strings, dtypes and tensors. Functions are referred to by name: a kernel by
op, provider and function, anything else by module and name.
"""

import dis
import importlib
import math
import operator
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.profiler import record_function

from atomc.op import REGISTRY
from atomc.torch_compat import FakeTensor
from atomc.torch_inductor import InductorCode, from_code
from atomc.trace import label_of, labels_of, with_ranges

Plain = dict[str, Any]


class Unstorable(Exception):
    """The function cannot be made plain data; the message says why."""


@dataclass(frozen=True)
class Function:
    """A function, how to make plain data of it (which raises Unstorable if that cannot be), and how to make the same
    with a profiler's range around each kernel."""

    call: Callable[..., Any]
    plain: Callable[[], Plain]
    named: Callable[[], Callable[..., Any]]


def of_graph(gm: GraphModule) -> Function:
    """The Python that FX generates for a graph without submodules."""
    gm.recompile()
    labels = labels_of(gm.graph)
    return Function(gm.forward, lambda: _python(gm, {}, labels), lambda: _with_ranges_of(gm, {}, labels))


def of_pieces(whole: GraphModule, pieces: Mapping[str, Function]) -> Function:
    """The Python that FX generates for a graph which calls these functions in the place of submodules."""
    labels = labels_of(whole.graph) | {name: f"{_place(whole, name)}: glue" for name in pieces}
    for name, piece in pieces.items():
        # The generated code calls self.<name>, and a plain function costs no hooks.
        del whole._modules[name]
        whole.__dict__[name] = piece.call
    return Function(whole.forward, lambda: _python(whole, pieces, labels), lambda: _with_ranges_of(whole, pieces, labels))


def _place(whole: GraphModule, piece: str) -> str:
    """The module that a piece begins in."""
    graph: Any = whole.get_submodule(piece).graph
    found = [label_of(node).partition(": ")[0] for node in graph.nodes if node.op == "call_function"]
    return next((path for path in found if path != "-"), "-")


def _with_ranges_of(gm: GraphModule, pieces: Mapping[str, Function], labels: Mapping[str, str]) -> Callable[..., Any]:
    generated = gm.graph.python_code("self")
    names = {str(node.target).partition(".")[0] for node in gm.graph.find_nodes(op="get_attr")}
    owner = {name: getattr(gm, name) for name in names} | {name: piece.named() for name, piece in pieces.items()}
    return _executed(with_ranges(generated.src, labels), generated.globals, owner)


def _executed(code: Any, names: Mapping[str, Any], owner: Mapping[str, Any]) -> Callable[..., Any]:
    """The method `forward` that the code defines, of an object with these attributes."""
    namespace = {**names, "record_function": record_function}
    exec(compile(code, "<atomc>", "exec"), namespace)
    return types.MethodType(namespace["forward"], types.SimpleNamespace(**owner))


def of_inductor(
    call: Callable[..., Any], code: InductorCode | str, returns_tuple: bool, patches: Mapping[str, Any]
) -> Function:
    """What Inductor made, with its code or the reason why that does not suffice."""

    def plain() -> Plain:
        if isinstance(code, str):
            raise Unstorable(code)
        return {"kind": "inductor", "code": asdict(code), "returns_tuple": returns_tuple, "patches": dict(patches)}

    return Function(call, plain, lambda: call)


def made_of(plain: Plain, named: bool = False) -> Callable[..., Any]:
    """The function again; with a profiler's ranges if `named`. Raises whatever a name that no longer exists raises."""
    if plain["kind"] == "inductor":
        return from_code(InductorCode(**plain["code"]), plain["returns_tuple"], plain["patches"])
    unique = [made_of(piece, named) for piece in plain["unique"]]
    names = {name: resolved(reference) for name, reference in plain["names"].items()}
    code = with_ranges(plain["source"], plain["labels"]) if named else plain["source"]
    return _executed(code, names, {**plain["constants"], **{name: unique[i] for name, i in plain["pieces"].items()}})


def _python(gm: GraphModule, pieces: Mapping[str, Function], labels: Mapping[str, str]) -> Plain:
    generated = gm.graph.python_code("self")
    used = set(_global_names(compile(generated.src, "<atomc cache>", "exec")))
    constants = {}
    for node in gm.graph.find_nodes(op="get_attr"):
        found = operator.attrgetter(str(node.target))(gm)
        if type(found) not in (Tensor, torch.nn.Parameter, torch.nn.Buffer) or isinstance(found, FakeTensor):
            raise Unstorable(f"{node.target} in the graph is a {type(found).__name__}")
        if "." in str(node.target):
            raise Unstorable(f"{node.target} lies in a submodule")
        constants[str(node.target)] = found.detach()
    unique = list({id(piece): piece for piece in pieces.values()}.values())
    return {
        "kind": "python", "source": generated.src, "constants": constants,
        "names": {name: reference(item) for name, item in generated.globals.items() if name in used},
        "pieces": {name: unique.index(piece) for name, piece in pieces.items()},
        "unique": [piece.plain() for piece in unique], "labels": dict(labels),
    }  # fmt: skip


def _global_names(code: types.CodeType) -> Iterator[str]:
    """The global names that a piece of code reads, also in the functions it defines."""
    yield from (step.argval for step in dis.get_instructions(code) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"))
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _global_names(constant)


Reference = tuple[str, ...]


def reference(item: Any) -> Reference:
    """The name of a module, a function, a kernel or what belongs to one. Raises Unstorable if it has none."""
    if isinstance(item, types.ModuleType):
        return ("module", item.__name__)
    if isinstance(item, float) and not math.isfinite(item):
        return ("float", repr(item))
    if item is type(None):
        return ("none",)
    for op in REGISTRY.values():
        if op.reference is item:
            return ("meaning", op.name)
        for kernel in op.kernels:
            for field, function in _parts_of(kernel):
                if function is item:
                    return ("kernel", op.name, kernel.provider, _full_name(kernel.function), field)
    found: Reference = ("name", getattr(item, "__module__", None) or "builtins", getattr(item, "__qualname__", ""))
    try:
        same = resolved(found) is item
    except (ImportError, AttributeError):
        same = False
    if not same:
        raise Unstorable(f"{item!r} cannot be found by its name in another process")
    return found


def resolved(name: Reference) -> Any:
    """What a reference names. Raises ImportError, AttributeError or LookupError if that is gone."""
    kind, *rest = name
    if kind == "module":
        return importlib.import_module(rest[0])
    if kind == "float":
        return float(rest[0])
    if kind == "none":
        return type(None)
    if kind == "meaning":
        return REGISTRY[rest[0]].reference
    if kind == "name":
        return operator.attrgetter(rest[1])(importlib.import_module(rest[0]))
    op, provider, function, field = rest
    for kernel in REGISTRY[op].kernels:
        if kernel.provider == provider and _full_name(kernel.function) == function:
            return dict(_parts_of(kernel))[field]
    raise LookupError(f"no kernel {function} of {provider} for {op}")


def _parts_of(kernel: Any) -> Iterator[tuple[str, Callable[..., Any]]]:
    """The functions of a kernel that a lowered graph may refer to, by name."""
    yield "function", kernel.function
    if kernel.workspace is not None:
        yield "workspace", kernel.workspace
    if kernel.plan is not None:
        yield "plan", kernel.plan
    for names, prepare in kernel.prepare.items():
        yield f"prepare {', '.join(names)}", prepare


def _full_name(function: Callable[..., Any]) -> str:
    return f"{function.__module__}.{function.__qualname__}"
