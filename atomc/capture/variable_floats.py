"""Keeps Python floats as inputs that only arithmetic with tensors reads.

    x / t.item()    =>    x / t.to(float32)        t: float64 []

Passes see the operand as a number, so that a rewrite may take it as an attribute, such as the eps
of a norm. Then, and if anything else reads the float, it is a constant: Dynamo guards its value.
"""

import operator
from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor
from torch._prims_common import get_computation_dtype
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import Target

from atomc.capture.floats import is_item
from atomc.graph.canonical import value
from atomc.graph.edit import insert
from atomc.graph.node_record import record_of
from atomc.graph.variable_float import VariableFloat
from atomc.torch_compat.core import Input
from atomc.torch_compat.float_inputs import TraceAgain, make_constants, varies
from atomc.torch_compat.tracing import fake_mode_of, lifted_floats

aten = torch.ops.aten
# The names under which Dynamo's graph has arithmetic of two operands.
_ARITHMETIC = ("add", "sub", "mul", "truediv", "div", "pow")
_COMMUTATIVE = ("add", "mul")
_FUNCTIONS: dict[Target, str] = {
    getattr(module, name): name
    for name in _ARITHMETIC
    for module in (operator, torch)
    if hasattr(module, name)
}
_IN_PLACE: dict[Target, str] = {
    getattr(operator, f"i{name}"): name for name in ("add", "sub", "mul", "truediv", "pow")
} | {f"{name}_": name for name in _ARITHMETIC}
_OPS: dict[Target, str] = {**_FUNCTIONS, **_IN_PLACE, **{name: name for name in _ARITHMETIC}}
# Functional ops whose second operand passes may see as a number, by the op that takes a number.
_WITH_NUMBER: dict[Callable[..., Tensor], Callable[..., Tensor]] = {
    aten.add.Tensor: aten.add.Tensor,
    aten.sub.Tensor: aten.sub.Tensor,
    aten.mul.Tensor: aten.mul.Tensor,
    aten.div.Tensor: aten.div.Tensor,
    aten.pow.Tensor_Tensor: aten.pow.Tensor_Scalar,
}
_WITH_TENSOR: dict[Target, Callable[..., Tensor]] = {
    with_number: op for op, with_number in _WITH_NUMBER.items()
}


def constant_floats(gm: GraphModule, inputs: Sequence[Input]) -> dict[int, float]:
    """The float inputs of Dynamo's graph that are constants, by number, with their values.

    Raises TraceAgain if Dynamo can trace again without them.
    """
    placeholders = gm.graph.find_nodes(op="placeholder")
    values = {node: inputs[placeholders.index(node)] for node in lifted_floats(gm.graph)}
    constants = {
        node: float(value)
        for node, value in values.items()
        if value is not None and not (_is_variable(node) and varies(node, float(value)))
    }
    make_constants(list(constants))
    return {placeholders.index(node): value for node, value in constants.items()}


def _is_variable(placeholder: Node) -> bool:
    """Whether only arithmetic reads a float input."""
    return all(is_item(reader) and _only_arithmetic_reads(reader) for reader in placeholder.users)


def _only_arithmetic_reads(number: Node) -> bool:
    return all(
        _name(reader) is not None
        and (
            _only_arithmetic_reads(reader)
            if _is_number(reader)
            else _dtype_of_operand(reader) is not None
        )
        for reader in number.users
    )


def _is_number(node: Node) -> bool:
    return isinstance(node.meta.get("example_value"), torch.SymFloat)


def _name(node: Node) -> str | None:
    """The name of arithmetic of two operands."""
    plain = node.op.startswith("call_") and len(node.args) == 2 and not node.kwargs
    return _OPS.get(node.target) if plain else None


def _tensor_operand(node: Node) -> Tensor | None:
    """The fake value of the only operand of a call that is a tensor."""
    values = [x.meta.get("example_value") for x in node.args if isinstance(x, Node)]
    tensors = [x for x in values if isinstance(x, Tensor)]
    return tensors[0] if len(tensors) == 1 else None


def _dtype_of_operand(node: Node) -> torch.dtype | None:
    """The dtype in which arithmetic of a tensor with a number takes the number, if a 0-d tensor of
    this dtype gives the same dtype of the result; else None.
    """
    tensor, result = _tensor_operand(node), node.meta.get("example_value")
    if tensor is None or not isinstance(result, Tensor) or tensor.dtype.is_complex:
        return None
    dtype = get_computation_dtype(torch.result_type(tensor, 1.0))
    zero = torch.empty((), dtype=dtype, device="meta")
    same = torch.result_type(torch.empty_like(tensor, device="meta"), zero) == result.dtype
    return dtype if same else None


def read_as_tensors(gm: GraphModule, constants: Collection[int]) -> None:
    """Let arithmetic of Dynamo's graph read float inputs as tensors, except those of these
    numbers.
    """
    placeholders = gm.graph.find_nodes(op="placeholder")
    floats = [n for n in lifted_floats(gm.graph) if placeholders.index(n) not in constants]
    numbers = [item for placeholder in floats for item in placeholder.users]
    for number in numbers:  # grows by the numbers computed from these
        numbers += [reader for reader in number.users if _is_number(reader)]
        for reader in list(number.users):
            if not _is_number(reader):
                _read_tensors(gm.graph, reader)
    unread = set(numbers)
    for node in reversed(gm.graph.nodes):
        if node in unread:
            gm.graph.erase_node(node)
    gm.recompile()


def _read_tensors(graph: Graph, reader: Node) -> None:
    """Let arithmetic read 0-d tensors in the place of numbers."""
    name, dtype = _name(reader), _dtype_of_operand(reader)
    mode = fake_mode_of(graph)
    assert mode is not None and dtype is not None

    def described(call_node: Node, dtype: torch.dtype) -> Node:
        with mode:
            fake = torch.empty((), dtype=dtype)
        call_node.meta = {**reader.meta, "example_value": fake}
        return call_node

    def tensor(number: Node) -> Node:
        """A number in float64, computed here: in the layer of its reader."""
        source = number.args[0]
        if is_item(number):
            assert isinstance(source, Node)
            return source
        copy = graph.node_copy(number, lambda x: tensor(x) if _is_number(x) else x)
        return described(copy, torch.float64)

    with graph.inserting_before(reader):
        first, second = (
            described(graph.call_method("to", (tensor(x), dtype)), dtype)
            if isinstance(x, Node) and _is_number(x)
            else x
            for x in reader.args
        )
        if first is not reader.args[0] and name in _COMMUTATIVE:
            first, second = second, first
        elif first is not reader.args[0] and name in ("truediv", "div"):  # as Tensor.__rdiv__
            root = graph.call_method("reciprocal", (second,))
            root.meta = dict(reader.meta)
            reader.op, reader.target, first, second = "call_function", operator.mul, root, first
    reader.args = (first, second)


def show_as_numbers(graph: Graph) -> None:
    """Let arithmetic of the functional graph read numbers in the place of float inputs."""
    for placeholder in graph.find_nodes(op="placeholder"):
        if float_input := record_of(placeholder).float_input:
            number = VariableFloat(float_input.value, placeholder.name)
            casts = [user for user in placeholder.users if user.target is aten._to_copy.default]
            for operand in (placeholder, *casts):
                _show_as_number(operand, number)


def _show_as_number(operand: Node, number: VariableFloat) -> None:
    for reader in list(operand.users):
        with_number = _WITH_NUMBER.get(reader.target)  # type: ignore[arg-type]
        if with_number is None or len(reader.args) != 2 or reader.kwargs:
            continue
        first, second = reader.args
        if not isinstance(first, Node) or first is operand:
            continue
        if second is operand and value(first).dim():
            reader.args, reader.target = (first, number), with_number


def readers_of_numbers(graph: Graph) -> dict[Node, str]:
    """The nodes that read a float input as a number -> the name of the input."""
    return {
        node: x.name
        for node in graph.nodes
        for x in (*node.args, *node.kwargs.values())
        if isinstance(x, VariableFloat)
    }


def show_as_tensors(graph: Graph, taken: Collection[str]) -> None:
    """Let arithmetic read float inputs as tensors again. taken: the inputs whose numbers are in
    other nodes, or decided how those compute.

    Raises TraceAgain if there are any: they are constants.
    """
    inputs = {node.name: node for node in graph.find_nodes(op="placeholder")}
    readers = readers_of_numbers(graph)
    constants = {*taken, *(name for node, name in readers.items() if not _is_arithmetic(node))}
    if constants:
        float_inputs = [record_of(inputs[name]).float_input for name in constants]
        raise TraceAgain(
            [float_input.placeholder for float_input in float_inputs if float_input is not None]
        )
    for node, name in readers.items():
        first = node.args[0]
        assert isinstance(first, Node)
        dtype = get_computation_dtype(torch.result_type(value(first), 1.0))
        operand = insert(node, aten._to_copy.default, inputs[name], dtype=dtype)
        node.args, node.target = (first, operand), _WITH_TENSOR[node.target]


def _is_arithmetic(node: Node) -> bool:
    return node.target in _WITH_TENSOR and len(node.args) == 2 and not node.kwargs
