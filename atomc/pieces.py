"""What runs a lowered graph: kernels are called as they are, the glue between them goes to Inductor or runs eagerly."""

import shutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.fx import GraphModule, Node
from torch.fx.passes.split_module import split_module

from atomc.options import Options
from atomc.platform import Platform
from atomc.torch_compat import fake_mode_of, inductor, tracing_context

# Nothing to gain from compiling a piece of these only.
_TRIVIAL = ("view", "_unsafe_view", "reshape", "transpose", "permute", "unsqueeze", "squeeze", "slice", "select", "t",
            "expand", "split", "split_with_sizes", "getitem", "sym_size", "alias", "detach")  # fmt: skip


def glue_of(options: Options, platform: Platform) -> tuple[str, str]:
    """("inductor" or "eager", why) for this platform."""
    if options.glue != "auto":
        return options.glue, "as the option says"
    if platform.is_cpu and not (shutil.which("g++") or shutil.which("clang++")):
        return "eager", "Inductor needs a C++ compiler for the CPU, and none is on the PATH"
    return "inductor", "the default"


def run_eagerly(gm: GraphModule) -> Callable[..., Any]:
    """The Python that FX generates: nothing to compile."""
    gm.recompile()
    return gm.forward


def compile_glue(gm: GraphModule, patches: Mapping[str, Any]) -> tuple[Callable[..., Any], int]:
    """Cut the graph at its kernels and compile what lies between; returns the callable and the number of pieces."""
    mode = fake_mode_of(gm.graph)
    kernels = [node for node in gm.graph.nodes if "kernel" in node.meta]
    if not kernels:
        with tracing_context(mode):
            return inductor(gm, _examples(gm), patches), 1
    number = _piece_numbers(gm)
    whole = split_module(gm, gm, lambda node: number[node], keep_original_order=True)
    compiled = 0
    for name, piece in list(whole.named_children()):
        if isinstance(piece, GraphModule) and worth_compiling(piece):
            with tracing_context(mode):
                function = inductor(piece, _examples(piece), patches)
            # In the place of the module: the generated code calls self.<name>, and a plain function costs no hooks.
            del whole._modules[name]
            whole.__dict__[name] = function
            compiled += 1
    return whole.forward, compiled


def _piece_numbers(gm: GraphModule) -> dict[Node, int]:
    """Runs of kernels and runs of glue, numbered in order."""
    number, current, in_kernels = {}, 0, None
    for node in gm.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        kernel = "kernel" in node.meta or (bool(in_kernels) and _name(node) == "getitem")
        if in_kernels is not None and kernel != in_kernels:
            current += 1
        in_kernels = kernel
        number[node] = current
    return number


def worth_compiling(piece: GraphModule) -> bool:
    """Whether a piece holds glue that Inductor can make faster: neither kernels nor views only."""
    calls = [node for node in piece.graph.nodes if node.op == "call_function"]
    return not any("kernel" in node.meta for node in calls) and any(_name(node) not in _TRIVIAL for node in calls)


def _name(node: Node) -> str:
    schema = getattr(node.target, "_schema", None)
    return schema.name.removeprefix("aten::") if schema is not None else getattr(node.target, "__name__", "")


def _examples(gm: GraphModule) -> Sequence[Any]:
    return [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
