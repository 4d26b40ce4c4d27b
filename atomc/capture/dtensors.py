"""Converts a graph of Dynamo over DTensors to one over the tensors of this process.

    x: DTensor [T, D] replicated, weight: DTensor [N, D], inputs divided over 2 processes
    linear(x, weight).redistribute(replicated).to_local()
    =>  x: [T, D], weight: [N, D / 2]
    wait_tensor(all_reduce(linear(x, weight), "sum", group))

A call whose result DTensor computes with the same call of the local tensors stays this call, so
that later stages find it as in a model on one process. Of any other one the graph has the ATen
operations of DTensor: conversions, look-ups in a part of a vocabulary, and functional collectives.
The numbers in these may depend on the rank. Operations on tensors of this process are not touched.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_map

from atomc.capture.functional import check_sharing, has_no_autocast
from atomc.capture.inline_regions import inline
from atomc.graph.expressions import expression
from atomc.torch_compat.core import FakeTensor, FakeTensorMode, GraphFunction, Input, Outputs
from atomc.torch_compat.dtensors import (
    Tracer,
    holds_mask,
    is_dtensor,
    local_tensor,
    mark_as_parameter,
    release_masks,
    replace_local,
)
from atomc.torch_compat.tracing import editable_copy

# Of the metadata of a call, what the operations that replace it keep.
_ORIGIN = ("nn_module_stack", "source_fn_stack", "stack_trace")


@dataclass(frozen=True)
class Localized:
    """A graph without DTensors, and its inputs.

    wrap  converts a callable of it to one with the signature of Dynamo's graph
    """

    graph: GraphModule
    inputs: Sequence[Input]
    wrap: Callable[[GraphFunction], GraphFunction]


def localize(gm: GraphModule, example_inputs: Sequence[Input]) -> Localized:
    """The graph of Dynamo over the tensors of this process; `gm` itself if it has no DTensor.

    The local tensor of a parameter is one as well afterwards: it can be packed with others.
    Raises NotImplementedError with what to do instead for a graph that cannot be converted.
    """
    if not _has_dtensors(gm, example_inputs):
        return Localized(gm, example_inputs, lambda call: call)
    check_sharing(gm, example_inputs)
    copy = editable_copy(gm)
    inline(copy)
    if not has_no_autocast(copy):
        raise _unsupported("autocast changes the dtypes of their operations")
    conversion = _Conversion(copy, example_inputs)
    conversion.run()
    inputs = [_local_input(example_inputs[i]) for i in conversion.kept]
    kept, outputs = conversion.kept, conversion.outputs
    return Localized(copy, inputs, lambda call: _OfProcess(call, kept, outputs))


def _has_dtensors(gm: GraphModule, inputs: Sequence[Input]) -> bool:
    return any(map(is_dtensor, inputs)) or any(
        is_dtensor(node.meta.get("example_value")) for node in gm.graph.nodes
    )


def _unsupported(why: str) -> NotImplementedError:
    return NotImplementedError(
        f"DTensors cannot be compiled here: {why}; load the model whole and call "
        "atomc.parallelize(model, tp=group)"
    )


def _local_input(argument: Input) -> Input:
    if not is_dtensor(argument):
        return argument
    local = local_tensor(argument)
    if isinstance(argument, nn.Parameter):
        mark_as_parameter(local)
    return local


@dataclass(eq=False)
class _OfProcess:
    """Calls a graph of local tensors with DTensors.

    kept     the numbers of the inputs that it has
    outputs  for each output, a DTensor like it, or None for one that is none
    """

    call: GraphFunction
    kept: Sequence[int]
    outputs: Sequence[Tensor | None]

    def __post_init__(self) -> None:
        self.returns_dtensors = any(like is not None for like in self.outputs)

    def __call__(self, *args: Input) -> Outputs:
        inputs = [args[i] for i in self.kept]
        outputs = self.call(*[local_tensor(x) if is_dtensor(x) else x for x in inputs])
        if not self.returns_dtensors:
            return outputs
        assert isinstance(outputs, Sequence)
        return [
            replace_local(like, local) if is_dtensor(like) and isinstance(local, Tensor) else local
            for like, local in zip(self.outputs, outputs, strict=True)
        ]


class _Conversion:
    """Builds a graph over local tensors, and gives it to a copy of Dynamo's graph.

    kept     the numbers of the inputs that remain
    outputs  see _OfProcess
    copies   node -> its copy, or the operation that computes its local tensor
    values   node -> its fake value, for nodes with a DTensor or an object among their operands
    """

    def __init__(self, gm: GraphModule, inputs: Sequence[Input]):
        self.gm, self.inputs = gm, inputs
        self.tracer = Tracer(_mode_of_values(gm))
        self.kept: list[int] = []
        self.outputs: list[Tensor | None] = []
        self.copies: dict[Node, Node] = {}
        self.values: dict[Node, Any] = {}

    def run(self) -> None:
        try:
            for number, node in enumerate(self.gm.graph.find_nodes(op="placeholder")):
                self._add_input(number, node)
            for node in self.gm.graph.nodes:
                if node.op == "output":
                    self._add_output(node)
                elif node.op != "placeholder":
                    self._add(node)
        finally:
            for value in filter(is_dtensor, self.values.values()):
                release_masks(value)
        graph = self.tracer.graph
        graph.lint()
        self.gm.graph = graph

    def _add_input(self, number: int, node: Node) -> None:
        fake, argument = node.meta.get("example_value"), self.inputs[number]
        if not (argument is None or isinstance(argument, Tensor | int | float | torch.SymInt)):
            self.values[node] = argument  # a DeviceMesh or a group, which only DTensor reads
            return
        self.kept.append(number)
        copy = self.copies[node] = self.tracer.graph.node_copy(node)
        copy._dynamo_source = getattr(node, "_dynamo_source", None)
        if is_dtensor(fake):
            local = local_tensor(fake)
            self.values[node] = fake
            self.tracer.track(local, copy)
            copy.meta = {**copy.meta, "example_value": local}
            copy.meta.pop("grapharg", None)
        elif isinstance(fake, torch.SymInt):
            self.tracer.track(fake, copy)

    def _add_output(self, node: Node) -> None:
        returned = node.args[0]
        assert isinstance(returned, list | tuple)
        for item in returned:
            value = self.values.get(item) if isinstance(item, Node) else None
            self.outputs.append(value if is_dtensor(value) else None)
            if is_dtensor(value) and holds_mask(value):
                raise _unsupported("the graph returns a look-up that is not summed")
            if is_dtensor(value) and any(type(size) is not int for size in value.shape):
                raise _unsupported(
                    "the graph returns a DTensor of a dynamic size, not a local tensor"
                )
        output = self.tracer.graph.output(map_arg(node.args[0], self._local_node))
        output.meta = dict(node.meta)

    def _add(self, node: Node) -> None:
        over_dtensors = any(x in self.values for x in node.all_input_nodes)
        if not over_dtensors and not is_dtensor(node.meta.get("example_value")):
            self.copies[node] = self._copy(node)
            return
        try:
            result = self._whole_call(node)
            if result is None:
                result = self._operations(node)
        except Exception as error:  # of any operation of DTensor
            [reason, *_] = str(error).splitlines() or [type(error).__name__]
            raise _unsupported(f"{node.target} ({node}): {reason}") from error
        computed = None if is_dtensor(result) else self.tracer.node_of(result)
        if computed is None:
            self.values[node] = result
        else:
            self.copies[node] = computed

    def _copy(self, node: Node) -> Node:
        copy = self.tracer.graph.create_node(
            node.op,
            node.target,
            map_arg(node.args, self._local_node),
            map_arg(node.kwargs, self._local_node),
            node.name,
        )
        copy.meta = dict(node.meta)
        return copy

    def _local_node(self, node: Node) -> Any:
        """What computes the local value of a node: another node, or a constant."""
        if node not in self.values:
            return self.copies[node]
        value = self.values[node]
        if is_dtensor(value):
            value = local_tensor(value)
        local = self.tracer.node_of(value)
        return value if local is None else local

    def _value(self, node: Node) -> Any:
        if node in self.values:
            return self.values[node]
        return self.tracer.alias(node.meta.get("example_value"), self.copies[node])

    def _operations(self, node: Node) -> Any:
        """Append the operations of DTensor for a call, and return its result."""
        before = next(iter(reversed(self.tracer.graph.nodes)))
        args, kwargs = map_arg((node.args, node.kwargs), self._value)
        with self.tracer.recording():
            result = _called(node, args, kwargs)
        origin = {key: node.meta[key] for key in _ORIGIN if key in node.meta}
        for operation in reversed(self.tracer.graph.nodes):
            if operation is before:
                break
            operation.meta = {**origin, "example_value": operation.meta.get("val")}
        return result

    def _whole_call(self, node: Node) -> Any:
        """Append the call with local operands, and return its result; None if DTensor computes it
        by other operations.
        """
        result = node.meta.get("example_value")
        over = [result, *(self.values.get(x) for x in node.all_input_nodes)]
        if not is_dtensor(result) or any(is_dtensor(x) and holds_mask(x) for x in over):
            return None
        if node.op == "call_method" and not hasattr(Tensor, str(node.target)):  # redistribute
            return None
        args, kwargs = map_arg(
            (node.args, node.kwargs),
            lambda x: self.values[x] if x in self.values else x.meta.get("example_value"),
        )
        result = _equal_locally(self.tracer, node, args, kwargs)
        if result is None:
            return None
        local = local_tensor(result)
        copy = self._copy(node)
        copy.meta["example_value"] = local
        self.tracer.track(local, copy)
        return result


def _mode_of_values(gm: GraphModule) -> FakeTensorMode:
    """The mode of the fake values of Dynamo's graph, which is not that of the tracing context."""
    for node in gm.graph.nodes:
        value = node.meta.get("example_value")
        local = local_tensor(value) if is_dtensor(value) else value
        if isinstance(local, FakeTensor):
            return local.fake_mode
    raise AssertionError("a graph with DTensors has fake values")


def _called(node: Node, args: Any, kwargs: Any) -> Any:
    if node.op == "call_method":
        target, *others = args
        return getattr(target, str(node.target))(*others, **kwargs)
    assert callable(node.target)
    return node.target(*args, **kwargs)


def _equal_locally(tracer: Tracer, node: Node, args: Any, kwargs: Any) -> Any:
    """The result of a call, if DTensor computes its local tensor with the operations that the same
    call has for the local operands; else None.
    """
    trial = Tracer(tracer.mode)

    def placed(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        local = local_tensor(x) if is_dtensor(x) else x
        fake = trial.alias(local, trial.graph.placeholder("x"))
        return replace_local(x, fake) if is_dtensor(x) else fake

    args, kwargs = tree_map(placed, (args, kwargs))
    here = tree_map(lambda x: local_tensor(x) if is_dtensor(x) else x, (args, kwargs))
    try:
        with trial.recording():
            result, plain = _called(node, args, kwargs), _called(node, *here)
    except Exception:  # a call that local tensors do not have, or not with these sizes
        return None
    if not is_dtensor(result) or is_dtensor(plain) or not isinstance(plain, Tensor):
        return None
    sizes: dict[str, int] = {}
    computed, alone = trial.node_of(local_tensor(result)), trial.node_of(plain)
    if computed is None or alone is None or _writes(trial):
        return None
    same = _expression(computed, sizes) == _expression(alone, sizes)
    return result if same else None


def _writes(trial: Tracer) -> bool:
    return any(
        node.target._schema.is_mutable
        for node in trial.graph.nodes
        if isinstance(node.target, torch._ops.OpOverload)
    )


def _expression(node: Node, sizes: dict[str, int]) -> int:
    """A number that is equal for nodes that compute the same from the same inputs."""
    if node.op == "placeholder":
        return sizes.setdefault(node.name, len(sizes))
    if isinstance(size := node.meta.get("val"), torch.SymInt):
        return sizes.setdefault(f"size {expression(size)}", len(sizes))
    args, kwargs = map_arg((node.args, node.kwargs), lambda x: f"%{_expression(x, sizes)}")
    return sizes.setdefault(f"{node.target} {args} {kwargs}", len(sizes))
