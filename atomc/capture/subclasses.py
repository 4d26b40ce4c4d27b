"""Tensor subclasses in a graph of Dynamo, which atomc does not compile: their classes say what
operations compute, and what the results are.
"""

from collections.abc import Iterator, Sequence

from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from atomc.graph.provenance import clean_path
from atomc.torch_compat.core import FakeTensor, Input
from atomc.torch_compat.dtensors import is_dtensor, local_tensor
from atomc.torch_compat.tracing import argument_of, source_name


def subclass_reason(gm: GraphModule, example_inputs: Sequence[Input]) -> str | None:
    """Why a graph with a tensor subclass is not treated, with its name; None if it has none.

    DTensors count as the tensors of this process.
    """
    placeholders = gm.graph.find_nodes(op="placeholder")
    for node, argument in zip(placeholders, example_inputs, strict=True):
        if is_subclass(argument):
            return f"{_name(node)} is {_described(argument)}"
    for value in _values(gm):
        if is_traceable_wrapper_subclass(value) and not is_dtensor(value):
            return f"the graph makes {_described(value)}"
    return None


def is_subclass(x: object) -> bool:
    """Whether the class of a tensor changes what operations on it compute, or what they return."""
    if is_dtensor(x):
        x = local_tensor(x)
    if not isinstance(x, Tensor) or type(x) in (Tensor, nn.Parameter) or isinstance(x, FakeTensor):
        return False
    kind = type(x)
    dispatches = kind.__torch_dispatch__ is not Tensor.__torch_dispatch__
    # Subclasses of Parameter return plain tensors.
    return dispatches or not issubclass(kind, nn.Parameter)


def _described(x: object) -> str:
    """What class it is, where that is from, and what to do."""
    if is_dtensor(x):
        x = local_tensor(x)
    library = ".".join(type(x).__module__.split(".")[:2])
    text = f"a tensor subclass, {type(x).__name__} of {library}, which atomc does not compile"
    if library.startswith("torchao"):
        return f"{text}: call atomc.adopt(model), which takes over torchao's int8, int4 and fp8"
    return f"{text}: pass plain tensors, such as those that it holds"


def check_weights(model: nn.Module) -> None:
    """Raise ValueError if a parameter or buffer is a tensor subclass."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_subclass(tensor):
            raise ValueError(f"{name} is {_described(tensor)}")


def _name(placeholder: Node) -> str:
    """The input's path in the model, or its argument's name."""
    argument = argument_of(placeholder)
    if argument is not None:
        return f"the argument {argument[0]}"
    source = source_name(placeholder) or placeholder.name
    path = clean_path(source.replace("_parameters", "").replace("_buffers", ""))
    return f"the argument {path}" if path.isdigit() else path


def _values(gm: GraphModule) -> Iterator[object]:
    """What Dynamo recorded for the results of all nodes, in nested regions too."""
    for module in gm.modules():
        if isinstance(module, GraphModule):
            for node in module.graph.nodes:
                value = node.meta.get("example_value")
                yield from value if isinstance(value, tuple | list) else (value,)
