"""From Dynamo's graph to a functional ATen graph, in two steps because each level knows what the other has lost.

On Dynamo's graph composite calls are lifted to ops and Python floats that became inputs are put back; then AOTAutograd
makes it functional, on fake tensors, and hands it to the compiler below.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Node

from atomc.torch_compat import FakeTensor, fake_mode_of, functional_graph, own_copy, source_name

Compiler = Callable[[GraphModule, Sequence[Any]], Callable[..., Any]]


def trace(
    gm: GraphModule, example_inputs: Sequence[Any], lift: Callable[[GraphModule], None], compiler: Compiler,
    floats: dict[int, float],
) -> Callable[..., Any]:  # fmt: skip
    """Compile `gm` through `compiler`, which gets a functional ATen graph whose placeholder i is input i of `gm`.

    floats: input number -> the value to compile for. The result takes and returns what `gm` does.
    """
    copy = own_copy(gm)
    put_back_floats(copy, floats)
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

    return functional_graph(copy, fakes, with_sources)


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


