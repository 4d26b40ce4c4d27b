"""Partitions a lowered graph at its kernels and compiles the glue between them with Inductor."""

import contextlib
import operator
import shutil
from collections.abc import Hashable, Sequence, Set

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.passes.split_module import split_module

from atomc.cache.generated import (
    CompiledFunction,
    graph_function,
    inductor_function,
)
from atomc.capture.structural_hash import structural_key
from atomc.compiler.bind_sizes import bind_sizes, copy_numbers
from atomc.files.json_types import JSONMapping
from atomc.graph.mutation import mutated, storage
from atomc.graph.node_record import record_of
from atomc.options import Options
from atomc.platform import Platform
from atomc.torch_compat.core import FakeTensorMode, Input
from atomc.torch_compat.inductor import inductor_code, kernels_at_once, num_cache_hits
from atomc.torch_compat.tracing import fake_mode_of, tracing_context

# A piece of only these ops is not compiled.
_TRIVIAL = (
    "view", "_unsafe_view", "reshape", "transpose", "permute", "unsqueeze", "squeeze", "slice",
    "select", "t", "expand", "split", "split_with_sizes", "unbind", "getitem", "sym_size", "alias",
    "detach", "_foreach_add_",
)  # fmt: skip


def glue_of(options: Options, platform: Platform) -> tuple[str, str]:
    """("inductor" or "eager", why) for this platform."""
    if options.glue != "auto":
        return options.glue, f"option glue is {options.glue}"
    if platform.is_cpu and not (shutil.which("g++") or shutil.which("clang++")):
        return "eager", "Inductor needs a C++ compiler for the CPU, and none is on the PATH"
    return "inductor", "option glue is auto"


def compile_glue(gm: GraphModule, patches: JSONMapping) -> tuple[CompiledFunction, str]:
    """Cut the graph at its kernels and compile the pieces between, equal pieces once. Returns the
    function and a text with the number of pieces. Call sink_pointwise before.

    Inductor keeps what it compiles on disk, keyed by graph, options, versions and platform
    (TORCHINDUCTOR_CACHE_DIR).
    """
    mode, loaded = fake_mode_of(gm.graph), num_cache_hits()
    kernels = [node for node in gm.graph.nodes if record_of(node).kernel]
    if not kernels:
        return _compile_piece(gm, _examples(gm), mode, patches), "1 piece" + _known(loaded)
    _gather_parts(gm.graph)
    number = piece_numbers(gm, _views_for_kernels(gm.graph))
    copy_numbers(gm.graph, number)
    split = split_module(gm, gm, lambda node: number[node], keep_original_order=True)
    compiled: dict[Hashable, CompiledFunction] = {}
    functions: dict[str, CompiledFunction] = {}
    count = 0
    with kernels_at_once():
        for name, piece in list(split.named_children()):
            if not isinstance(piece, GraphModule):
                continue
            if not worth_compiling(piece):
                functions[name] = graph_function(piece)
                continue
            (call,) = split.graph.find_nodes(op="call_module", target=name)
            bind_sizes(split, piece, call)
            count += 1
            # Equal pieces that write may differ in the aliases of their inputs.
            key = name if _writes(piece) else structural_hash(piece)
            if key not in compiled:
                compiled[key] = _compile_piece(
                    piece, _examples(piece) if key == name else _fresh(piece, mode), mode, patches
                )
            functions[name] = compiled[key]
    return graph_function(split, functions), f"{count} pieces, {len(compiled)} unique" + _known(
        loaded
    )


def _compile_piece(
    gm: GraphModule,
    examples: Sequence[Input],
    mode: FakeTensorMode | None,
    patches: JSONMapping,
) -> CompiledFunction:
    returns_tuple = isinstance(gm.graph.output_node().args[0], tuple | list)
    with tracing_context(mode):
        call, code = inductor_code(gm, examples, patches)
    return inductor_function(call, code, returns_tuple, patches)


def _known(before: int) -> str:
    count = num_cache_hits() - before
    return f", {count} from Inductor's cache" if count else ""


def structural_hash(piece: GraphModule) -> Hashable:
    """Equal for pieces that compute the same, whatever their nodes are called."""
    numbers = {node: i for i, node in enumerate(piece.graph.nodes)}
    return tuple(
        (
            node.op,
            node.target if node.op == "call_function" else None,
            id(getattr(piece, str(node.target))) if node.op == "get_attr" else None,
            structural_key(
                (node.args if node.op != "placeholder" else (), node.kwargs, node.meta.get("val")),
                numbers,
            ),
        )
        for node in piece.graph.nodes
    )


def _writes(piece: GraphModule) -> bool:
    return any(mutated(node) for node in piece.graph.nodes)


def _fresh(piece: GraphModule, mode: FakeTensorMode | None) -> Sequence[Input]:
    """Example inputs with separate storage: inlined regions share fake tensors, which Inductor
    would take for one input.
    """
    with mode or contextlib.nullcontext():
        return [
            torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
            if isinstance(x, Tensor)
            else x
            for x in _examples(piece)
        ]


def _gather_parts(graph: Graph) -> None:
    """Move the parts of each result right behind it, so that no tuple leaves a piece."""
    for node in reversed(list(graph.nodes)):
        source = node.args[0] if node.target is operator.getitem else None
        if isinstance(source, Node) and source.op == "call_function":
            source.append(node)


def _views_for_kernels(graph: Graph) -> set[Node]:
    """The views of inputs that the graph writes, such as a cache, which only kernels read; they are
    moved to the first of these. AOTAutograd would compute those that a piece returns after each of
    its calls, and a function with such a wrapper cannot be cached.
    """
    written = {storage(target) for node in graph.nodes for target in mutated(node)}
    written = {base for base in written if base.op == "placeholder"}
    views: set[Node] = set()
    for node in reversed(list(graph.nodes)):
        # A part of a tuple stays with it.
        is_view = is_trivial(node) and node.target is not operator.getitem
        is_view = is_view and isinstance(node.meta.get("val"), Tensor)
        if (
            is_view
            and node.users
            and storage(node) in written
            and all(x.op == "output" or record_of(x).kernel or x in views for x in node.users)
        ):
            views.add(node)
            next(x for x in graph.nodes if x in node.users).prepend(node)
    return views


def piece_numbers(gm: GraphModule, views: Set[Node] = frozenset()) -> dict[Node, int]:
    """Runs of kernels and runs of glue, numbered in order. views: are no glue."""
    number, current, in_kernels = {}, 0, None
    for node in gm.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        kernel = bool(record_of(node).kernel) or node in views
        kernel |= bool(in_kernels) and _name(node) == "getitem"
        if in_kernels is not None and kernel != in_kernels:
            current += 1
        in_kernels = kernel
        number[node] = current
    return number


def worth_compiling(piece: GraphModule) -> bool:
    """Whether a piece holds glue that Inductor can make faster: neither kernels nor views only."""
    calls = [node for node in piece.graph.nodes if node.op == "call_function"]
    return not any(record_of(node).kernel for node in calls) and any(
        not is_trivial(node) for node in calls
    )


def is_trivial(node: Node) -> bool:
    """Whether a piece of only such nodes is not compiled."""
    return _name(node) in _TRIVIAL


def _name(node: Node) -> str:
    schema = getattr(node.target, "_schema", None)
    return (
        schema.name.removeprefix("aten::")
        if schema is not None
        else getattr(node.target, "__name__", "")
    )


def _examples(gm: GraphModule) -> Sequence[Input]:
    return [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
