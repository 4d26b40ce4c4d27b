"""The Python that torch.fx and Inductor make of graphs, as functions that can be made plain data (atomc.cache.artifact)."""

import dis
import operator
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from atomc.cache.artifact import Plain, Unstorable, executed, reference
from atomc.profiler_ranges import with_ranges
from atomc.structured_trace import label_of, labels_of
from atomc.torch_compat.inductor import InductorCode
from atomc.torch_compat.names import FakeTensor


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
    return executed(with_ranges(generated.src, labels), generated.globals, owner)


def of_inductor(
    call: Callable[..., Any], code: InductorCode | str, returns_tuple: bool, patches: Mapping[str, Any]
) -> Function:
    """What Inductor made, with its code or the reason why that does not suffice."""

    def plain() -> Plain:
        if isinstance(code, str):
            raise Unstorable(code)
        return {"kind": "inductor", "code": asdict(code), "returns_tuple": returns_tuple, "patches": dict(patches)}

    return Function(call, plain, lambda: call)


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
