"""What a call of a compiled graph did: the kernels that it launched and the ops of PyTorch that it
called, in their order.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from atomc.torch_compat.core import GraphFunction, Input, Outputs
from atomc.torch_compat.cpp_kernels import watched_cpp_kernels
from atomc.torch_compat.launches import Launch, watched_launches


class Unrepeatable(Exception):
    """A call cannot be repeated without its Python; the message says why."""


@dataclass(frozen=True)
class Call:
    """An op of PyTorch, with what it returned: tensors, and what follows from shapes."""

    function: OpOverload
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    results: Sequence[Any]


@dataclass(frozen=True)
class Opaque:
    """A tensor without strides, such as a weight in a layout of oneDNN, that ops only read."""

    tensor: Tensor

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Opaque) and self.tensor is other.tensor

    def __hash__(self) -> int:
        return id(self.tensor)

    def __repr__(self) -> str:
        return f"Opaque({id(self.tensor)})"


Event = Launch | Call
# Namespaces of ops in which processes wait for each other, and that all must repeat or none.
_COLLECTIVE = ("c10d", "_c10d_functional", "c10d_functional", "symm_mem")


@dataclass
class Recording:
    """A call of a graph: its inputs, what it did, and its outputs. All of its tensors are alive, so
    that no two of them have the same address.
    """

    inputs: Sequence[Input]
    events: list[Event] = field(default_factory=list)
    outputs: Outputs = None
    bytes: int = 0  # of tensors that are no inputs


def record(
    call: GraphFunction, inputs: Sequence[Input], most_bytes: int
) -> tuple[Outputs, Recording | str]:
    """Call a graph. Returns the outputs, and what the call did, or why that cannot be said.

    most_bytes  of all tensors of the recording that are no inputs
    """
    recorder = _Recorder(Recording(inputs), most_bytes)
    seen = recorder.launched
    with recorder, watched_launches(seen), watched_cpp_kernels(seen):
        outputs = call(*inputs)
    recorder.recording.outputs = outputs
    return outputs, recorder.reason or recorder.recording


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the ops of PyTorch, and, by `launched`, kernels."""

    supports_higher_order_operators = True

    def __init__(self, recording: Recording, most_bytes: int):
        super().__init__()  # type: ignore[no-untyped-call]
        self.recording, self.most_bytes = recording, most_bytes
        self.reason: str | None = None
        self.storages = {storage_address(x) for x in recording.inputs if isinstance(x, Tensor)}
        self.in_op = False  # whose kernels are launched again by calling the op

    def launched(self, launch: Launch) -> None:
        if not self.in_op:
            self._append(launch, tree_leaves((launch.args, launch.kwargs)))

    def __torch_dispatch__(
        self,
        function: OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if not isinstance(function, OpOverload) or function.namespace in _COLLECTIVE:
            self._stop(f"it calls {function}")
            return function(*args, **(kwargs or {}))
        if _is_composite(function):
            with self:
                return function.decompose(*args, **(kwargs or {}))
        self.in_op = True
        try:
            result = function(*args, **(kwargs or {}))
        finally:
            self.in_op = False
        try:
            self._called(function, args, kwargs or {}, result)
        except Exception as bug:  # a graph must not fail because it is watched
            self._stop(f"a bug of atomc, please report it: {type(bug).__name__}: {bug}")
        return result

    def _called(
        self, function: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any
    ) -> None:
        args, kwargs = tree_map(_marked, (args, kwargs))
        operands = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        results = result if isinstance(result, tuple | list) else [result]
        tensors = [*operands, *(x for x in tree_leaves(results) if isinstance(x, Tensor))]
        if any(x.layout != torch.strided for x in tensors):
            self._stop(f"{function} has a tensor without strides")
        elif _is_read_by_host(function, operands):
            self._stop(f"the host reads what {function} returns")
        elif not _computes_nothing(function, operands, results):
            self._append(Call(function, args, kwargs, results), tensors)

    def _append(self, event: Event, values: Sequence[Any]) -> None:
        if self.reason is not None:
            return
        self.recording.events.append(event)
        for x in values:
            if isinstance(x, Tensor) and storage_address(x) not in self.storages:
                self.storages.add(storage_address(x))
                self.recording.bytes += x.untyped_storage().nbytes()
        if self.recording.bytes > self.most_bytes:
            self._stop(f"temporaries of a call have more than {self.most_bytes // 2**20} MiB")

    def _stop(self, reason: str) -> None:
        self.reason = self.reason or reason
        self.recording.events.clear()


def storage_address(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _marked(x: Any) -> Any:
    return Opaque(x) if isinstance(x, Tensor) and x.is_mkldnn else x


def _is_composite(function: OpOverload) -> bool:
    """Whether a call of an op of PyTorch consists of calls of other ops."""
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    name = function.name()  # type: ignore[no-untyped-call]
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return function.namespace == "aten" and bool(has_kernel(name, key))


def _is_read_by_host(function: OpOverload, operands: Sequence[Tensor]) -> bool:
    """Whether the host reads values, or the number of values, that a call returns."""
    if function is torch.ops.aten.index.Tensor:
        return any(index.dtype in (torch.bool, torch.uint8) for index in operands[1:])
    tags = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
    return any(tag in function.tags for tag in tags)


def _computes_nothing(
    function: OpOverload, operands: Sequence[Tensor], results: Sequence[Any]
) -> bool:
    """Whether a call returns only views of its operands, or memory without values, or has nothing
    to do with tensors.
    """
    tensors = [x for x in tree_leaves(results) if isinstance(x, Tensor)]
    if function._schema.is_mutable or not tensors:
        return not (operands or tensors)
    if function.namespace != "aten":  # it may do something with what it returns
        return bool(function.is_view)
    if function.overloadpacket.__name__.removeprefix("new_").startswith("empty"):
        return True
    storages = {storage_address(x) for x in operands}
    return all(storage_address(x) in storages for x in tensors)
