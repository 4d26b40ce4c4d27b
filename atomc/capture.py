"""From Dynamo's graph to a functional ATen graph, in two steps because each level knows what the other has lost.

On Dynamo's graph composite calls are lifted to ops and Python floats that became inputs are put back; then AOTAutograd
makes it functional, on fake tensors, and hands it to the compiler below.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from atomc.errors import SharingError
from atomc.provenance import module_path
from atomc.stamp import inline, region, regions_of, stamp
from atomc.torch_compat import FakeTensor, fake_mode_of, functional_graph, own_copy, own_region_cache, source_name

Compiler = Callable[[GraphModule, Sequence[Any]], Callable[..., Any]]


def trace(
    gm: GraphModule, example_inputs: Sequence[Any], lift: Callable[[GraphModule], None], compiler: Compiler,
    floats: dict[int, float], notes: list[str],
) -> Callable[..., Any]:  # fmt: skip
    """Compile `gm` through `compiler`, which gets a functional ATen graph whose placeholder i is input i of `gm`.

    floats: input number -> the value to compile for. The result takes and returns what `gm` does. Regions are traced once
    and stamped; should that fail, every layer is traced, and a note says so.
    Raises SharingError if layers with weights of their own came as calls of a region with the same weights.
    """
    check_sharing(gm, example_inputs)
    copy = own_copy(gm)
    put_back_floats(copy, floats)
    if regions_of(copy) and not (sink_constants(copy) and means_the_same_alone(copy)):
        inline(copy)
    lift(copy)
    placeholders = copy.graph.find_nodes(op="placeholder")
    for node in placeholders:
        if not hasattr(node, "_dynamo_source"):
            node._dynamo_source = None
    fakes = [node.meta.get("example_value", given) for node, given in zip(placeholders, example_inputs, strict=True)]
    mode = fake_mode_of(copy.graph)
    if mode is not None:
        fakes = [mode.from_tensor(x, static_shapes=True) if isinstance(x, Tensor) and not isinstance(x, FakeTensor) else x
                 for x in fakes]  # fmt: skip
    sources = [source_name(node) for node in placeholders]

    def with_sources(functional: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        for node, source in zip(functional.graph.find_nodes(op="placeholder"), sources, strict=True):
            node.meta["source"] = source
        return compiler(functional, inputs)

    if not regions_of(copy):
        return functional_graph(copy, fakes, with_sources)
    stamped = []

    def stamp_first(functional: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        stamp(functional)
        stamped.append(functional)
        return with_sources(functional, inputs)

    try:
        with own_region_cache():
            return functional_graph(copy, fakes, stamp_first)
    except Exception as error:  # whatever the tracer has against regions, it may have nothing against their nodes
        if stamped:
            raise
        notes.append(f"every layer was traced, since tracing one for all failed: {type(error).__name__}: {error}")
        inline(copy)
        return functional_graph(copy, fakes, with_sources)


def check_sharing(gm: GraphModule, example_inputs: Sequence[Any]) -> None:
    """Raise SharingError if Dynamo took one layer for another.

    torch 2.13 does so for layers that it reaches by a bound method, such as those that accelerate puts hooks on.
    """
    inputs = dict(zip(gm.graph.find_nodes(op="placeholder"), example_inputs, strict=True))
    for calls in regions_of(gm).values():
        paths: dict[tuple[Node, ...], str] = {}
        for call in calls:
            weights = tuple(x for x in call.args[2:] if isinstance(x, Node) and isinstance(inputs.get(x), nn.Parameter))
            path = module_path(call)
            if weights and paths.setdefault(weights, path) != path:
                raise SharingError(f"torch.compile gives {path} the weights of {paths[weights]}: it cannot tell the prepared "
                               "layers of this model apart; call atomc.regions.unprepare(model) first")  # fmt: skip


def sink_constants(gm: GraphModule) -> bool:
    """Move Python numbers from the calls of a region into it; False, and nothing done, if they differ between calls."""
    everywhere = regions_of(gm)
    for calls in everywhere.values():
        for operands in zip(*(call.args[2:] for call in calls), strict=True):
            if not all(isinstance(x, Node) for x in operands) and any(x != operands[0] for x in operands):
                return False
    for name, calls in everywhere.items():
        body = region(gm, name)
        for number, placeholder in reversed(list(enumerate(body.graph.find_nodes(op="placeholder"), 2))):
            constant = calls[0].args[number]
            if not isinstance(constant, Node):
                _replace_in_readers(placeholder, constant)
                body.graph.erase_node(placeholder)
                for call in calls:
                    call.args = (*call.args[:number], *call.args[number + 1:])
        body.recompile()
    gm.recompile()
    return True


def means_the_same_alone(gm: GraphModule) -> bool:
    """Whether no node of the graph changes what the ops in a region mean, as autocast does."""
    return all(node.target is not torch.amp.autocast_mode._enter_autocast for node in gm.graph.nodes)


def put_back_floats(gm: GraphModule, floats: dict[int, float]) -> None:
    """Make constants of Python floats that Dynamo lifted to 0-d inputs. The (now unused) inputs stay."""
    placeholders = gm.graph.find_nodes(op="placeholder")
    for number, constant in floats.items():
        for reader in list(placeholders[number].users):
            if reader.op == "call_method" and reader.target == "item":
                _replace_in_readers(reader, constant)
                gm.graph.erase_node(reader)
    gm.recompile()


def _replace_in_readers(node: Node, constant: float) -> None:
    for reader in list(node.users):
        reader.args = _with(reader.args, node, constant)
        reader.kwargs = _with(reader.kwargs, node, constant)


def _with(argument: Any, node: Node, constant: float) -> Any:
    if isinstance(argument, Node):
        return constant if argument is node else argument
    if isinstance(argument, tuple | list):
        return type(argument)(_with(part, node, constant) for part in argument)
    if isinstance(argument, dict):
        return {name: _with(part, node, constant) for name, part in argument.items()}
    return argument


def wants_gradients(inputs: Sequence[Any]) -> bool:
    """Whether any input asks for a gradient."""
    return any(isinstance(x, Tensor) and x.requires_grad for x in inputs)
