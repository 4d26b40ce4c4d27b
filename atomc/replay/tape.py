"""A recorded call as generated Python: one line for each kernel and each op of PyTorch, with all
that does not vary written into it.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from atomc.replay.arenas import Arenas, View
from atomc.replay.bound import Bound, Libraries, ProductChoice, Slot
from atomc.replay.memory import (
    ALIGNMENT,
    Fixed,
    InInput,
    InTemporary,
    Memory,
    Temporary,
    arrange,
)
from atomc.replay.recording import Call, Event, Opaque, Recording, Unrepeatable
from atomc.replay.shared_calls import share_calls
from atomc.torch_compat.core import Input, Outputs, strided
from atomc.torch_compat.cuda_driver import Kernel
from atomc.torch_compat.launches import STREAM, Launch

_ARENA = "arena"


@dataclass(frozen=True)
class Tape:
    """What calls of one kind launch.

    run      (inputs, addresses of those that are tensors, by number, stream) -> outputs
    kernels, ops  how many each call launches
    direct   how many of both CUDA's driver and cuBLASLt get directly
    bytes    of the allocation of its temporaries
    """

    run: Callable[[Sequence[Input], Sequence[int], int], Outputs]
    kernels: int
    ops: int
    direct: int
    bytes: int


def tape_of(
    first: Recording,
    second: Recording,
    *,
    shared: bool = True,
    libraries: Libraries | None = None,
) -> Tape:
    """A function that does what both calls did, for other inputs of the same kind.

    shared     ops that compute the same run once
    libraries  launches and products of matrices that they know are calls of them

    Raises Unrepeatable if the two calls differ in more than addresses.
    """
    if len(first.events) != len(second.events):
        raise Unrepeatable("calls launch different numbers of kernels")
    events = list(zip(first.events, second.events, strict=True))
    memory = Memory(first, second)
    for number, (event, twin) in enumerate(events):
        _place(memory, event, twin, number)
    for x, other in _tensors(first.outputs, second.outputs):
        place = memory.place(x, other, len(events))
        if isinstance(place, InTemporary) and place.temporary.first == len(events):
            raise Unrepeatable("no visible kernel has written an output")
    left_out = share_calls(memory, first.events) if shared else set()
    left = [None if number in left_out else event for number, event in enumerate(first.events)]
    direct = libraries.direct(left) if libraries else {}
    functions = libraries.functions if libraries else dict
    return _Writer(memory, second, direct, functions).tape(events, left_out, first.outputs)


def _place(memory: Memory, event: Event, twin: Event, number: int) -> None:
    """Find the places of the tensors of an event."""
    if type(event) is not type(twin) or event.function != twin.function:
        raise Unrepeatable("calls launch different kernels")
    only_reads = isinstance(event, Call) and not event.function._schema.is_mutable
    for x, other in _tensors((event.args, event.kwargs), (twin.args, twin.kwargs)):
        is_new = not memory.holds(x)
        place = memory.place(x, other, number)
        if only_reads and is_new and isinstance(place, InTemporary):
            raise Unrepeatable("an op reads memory that nothing visible has written")
    if isinstance(event, Call) and isinstance(twin, Call):
        for x, other in _tensors(event.results, twin.results):
            is_new = not memory.holds(x)
            place = memory.place(x, other, number)
            if is_new and isinstance(place, InTemporary):
                if place.offset:
                    raise Unrepeatable(f"{event.function} returns a part of its memory")
                place.temporary.returned = True


class _Writer:
    """Writes the lines of a tape, once all places are found.

    Temporaries lie in one allocation, the arena, but those that an op returns and the outputs,
    which have names. On the CPU, where a call has done all when it returns, arenas and the tensors
    in them stay for later calls.
    """

    def __init__(
        self,
        memory: Memory,
        recording: Recording,
        direct: Mapping[int, Kernel | ProductChoice],
        functions: Callable[[], Mapping[str, Callable[..., object]]],
    ):
        self.memory, self.inputs = memory, recording.inputs
        self.direct = {n: one for n, one in direct.items() if self.has_fixed_bias(one)}
        self.constants: dict[str, Any] = {}
        self.names: dict[Temporary, str] = {}
        self.follows: dict[str, str] = {}  # line -> the tensor whose address it says
        self.arenas: dict[torch.dtype, str] = {}  # the arena as a tensor of each dtype
        self.bound = Bound(functions, self.slot, self.constants)
        self.workspaces: dict[int, Temporary] = {}
        for number, one in self.direct.items():
            if isinstance(one, ProductChoice):
                self.give_memory(one, number)
        in_arena = [one for one in memory.temporaries() if not self.is_named(one)]
        in_arena += self.workspaces.values()
        self.offsets, self.arena_bytes = arrange(in_arena)
        devices = {one.device for one in in_arena}
        if len(devices) > 1:
            raise Unrepeatable("its temporaries are on several devices")
        self.device = next(iter(devices), None)
        self.views: dict[View, str] | None = None  # those in arenas that stay
        on_cpu = self.device is not None and self.device.type == "cpu"
        if on_cpu and not any(isinstance(x, Launch) and x.addresses for x in recording.events):
            self.views = {}

    def has_fixed_bias(self, one: Kernel | ProductChoice) -> bool:
        """Whether cuBLASLt gets the address of a bias before the call."""
        bias = one.operands.bias if isinstance(one, ProductChoice) else None
        return bias is None or not isinstance(self.memory.find(bias), InTemporary)

    def give_memory(self, choice: ProductChoice, number: int) -> None:
        """Let a product write its result to memory of the tape, and have a workspace there."""
        place = self.memory.find(choice.operands.out)
        if isinstance(place, InTemporary) and place.temporary.first == number:
            place.temporary.returned = False
        if size := choice.algorithm.workspace:
            out = choice.operands.out
            self.workspaces[number] = Temporary(
                out.new_empty(size, dtype=torch.uint8), number, number
            )

    def is_named(self, one: Temporary) -> bool:
        return one.returned or one.last == self.memory.num_events

    def tape(
        self, events: Sequence[tuple[Event, Event]], left_out: Set[int], outputs: Outputs
    ) -> Tape:
        lines: list[str] = []
        for number, (event, twin) in enumerate(events):
            if number not in left_out:
                lines += self.event(event, twin, number)
            lines += [f"del {name}" for one, name in self.names.items() if one.last == number]
        lines += [f"outputs = {self.value(outputs, outputs, tensors=True)}"]
        lines += ["arenas.give(arena)"] if self.views else []
        lines += ["return outputs"]
        lines = [*self.arena(), *lines]
        if num_direct := self.bound.finish():
            lines = ["enter_thread()", "begin(addresses, stream)", *lines]
        bases = self.bound.bases()
        lines = [line for line in lines if self.follows.get(line) in (None, *bases)]
        if num_direct:
            lines = ["with lock:", *("    " + line for line in lines)]
        source = "\n    ".join(["def tape(inputs, addresses, stream):", *lines])
        names: dict[str, Any] = {"view": _view, "strided": strided, **self.constants}
        names |= {name: getattr(torch, name) for name in ("empty", "empty_strided", "uint8")}
        exec(compile(source, "<atomc replay>", "exec"), names)
        launched = [event for n, (event, _) in enumerate(events) if n not in left_out]
        ops = sum(isinstance(event, Call) for event in launched)
        return Tape(names["tape"], len(launched) - ops, ops, num_direct, self.arena_bytes)

    def arena(self) -> Iterator[str]:
        if self.views:
            self.constants["arenas"] = Arenas(self.arena_bytes, list(self.views))
            yield f"arena = {', '.join(self.views.values())}, = arenas.take()"
        elif self.device is not None:
            device = self.constant(self.device)
            size = -(-self.arena_bytes // ALIGNMENT) * ALIGNMENT  # a multiple of that of each dtype
            yield f"arena = empty({size}, dtype=uint8, device={device})"
            yield "a = arena.data_ptr()"
            yield self.at(_ARENA, "a")
            for dtype, name in self.arenas.items():
                yield f"{name} = arena.view({self.constant(dtype)})"

    def event(self, event: Event, twin: Event, number: int) -> Iterator[str]:
        new = [x for x in self.memory.temporaries() if x.first == number and self.is_named(x)]
        for one in new:
            self.names[one] = f"t{len(self.names)}"
            if not one.returned:
                yield f"{self.names[one]} = {self.allocation(one)}"
                yield self.at(self.names[one])
        if direct := self.direct_line(event, number):
            yield direct
            return
        function = self.constant(_function(event))
        tensors = isinstance(event, Call) or not event.addresses
        call = f"{function}({', '.join(self.arguments(event, twin, tensors))})"
        if isinstance(event, Call):
            results = [self.result(x, number) for x in event.results]
            call = f"{', '.join(results)} = {call}" if any(x != "_" for x in results) else call
        yield call
        yield from (self.at(self.names[one]) for one in new if one.returned)

    def at(self, name: str, address: str | None = None) -> str:
        """Says where a tensor is; for libraries, which may not need it."""
        line = f"at_{name}({address or f'{name}.data_ptr()'})"
        self.follows[line] = name
        return line

    def direct_line(self, event: Event, number: int) -> str | None:
        one = self.direct.get(number)
        if isinstance(one, Kernel) and isinstance(event, Launch):
            return self.bound.launch(one, event)
        if isinstance(one, ProductChoice):
            offset = self.offsets[self.workspaces[number]] if number in self.workspaces else 0
            return self.bound.product(one, (_ARENA, offset))
        return None

    def result(self, x: Any, number: int) -> str:
        """The name for what a call returns."""
        place = self.memory.find(x) if isinstance(x, Tensor) else None
        one = place.temporary if isinstance(place, InTemporary) else None
        return self.names[one] if one and one.returned and one.first == number else "_"

    def arguments(self, event: Event, twin: Event, tensors: bool) -> list[str]:
        if event.kwargs.keys() != twin.kwargs.keys():
            raise Unrepeatable("a kernel gets other arguments in each call")
        head, twin_head = (one.head if isinstance(one, Launch) else () for one in (event, twin))
        return [
            *self.values(head, twin_head, tensors),
            *self.values(event.args, twin.args, tensors),
            *(f"{k}={self.value(x, twin.kwargs[k], tensors)}" for k, x in event.kwargs.items()),
        ]

    def values(self, items: Sequence[Any], twins: Sequence[Any], tensors: bool) -> list[str]:
        if len(items) != len(twins):
            raise Unrepeatable("a kernel gets other arguments in each call")
        return [self.value(*pair, tensors) for pair in zip(items, twins, strict=True)]

    def value(self, x: Any, twin: Any, tensors: bool) -> str:
        """An expression for an argument, or for the output. tensors: otherwise addresses."""
        if isinstance(x, Tensor):
            return self.tensor(x) if tensors else self.address(x)
        if type(x) is tuple and type(twin) is tuple:
            return f"({''.join(f'{one}, ' for one in self.values(x, twin, tensors))})"
        if type(x) is list and type(twin) is list:
            return f"[{', '.join(self.values(x, twin, tensors))}]"
        if isinstance(x, tuple) and type(x) is type(twin):  # a NamedTuple
            return f"{self.constant(type(x))}({', '.join(self.values(x, twin, tensors))})"
        if x is STREAM:
            return "stream"
        if type(x) is not type(twin) or not (x == twin or x != x):
            raise Unrepeatable(f"a kernel gets another number in each call: {x}, then {twin}")
        return self.constant(x)

    def constant(self, x: Any) -> str:
        if x is None or type(x) in (bool, int, str) or (type(x) is float and math.isfinite(x)):
            return repr(x)
        name = f"c{len(self.constants)}"
        self.constants[name] = x.tensor if isinstance(x, Opaque) else x
        return name

    def address(self, x: Tensor) -> str:
        base, offset = self.slot(x)
        if base is None:
            return str(offset)
        if isinstance(base, int):
            address = f"addresses[{base}]"
        else:
            address = "a" if base == _ARENA else f"{base}.data_ptr()"
        return f"{address} + {offset}" if offset else address

    def slot(self, x: Tensor) -> Slot:
        """What the address of a tensor follows, and the bytes from there."""
        place = self.memory.find(x)
        if isinstance(place, Fixed):
            self.constant(place.tensor)  # stays alive
            return None, x.data_ptr()
        if isinstance(place, InInput):
            return place.number, place.offset
        if place.temporary in self.offsets:
            return _ARENA, self.offsets[place.temporary] + place.offset
        return self.names[place.temporary], place.offset

    def tensor(self, x: Tensor) -> str:
        place = self.memory.find(x)
        if isinstance(place, Fixed):
            return self.constant(place.tensor)
        layout = f"{tuple(x.shape)}, {x.stride()}"
        if isinstance(place, InInput):
            base, memory = f"inputs[{place.number}]", self.inputs[place.number]
        elif place.temporary in self.offsets:
            offset = self.offsets[place.temporary] + place.offset
            if self.views is not None:
                view = View(x.dtype, tuple(x.shape), x.stride(), offset)
                return self.views.setdefault(view, f"v{len(self.views)}")
            arena = self.arenas.setdefault(x.dtype, f"arena{len(self.arenas)}")
            return f"strided({arena}, {layout}, {offset // x.element_size()})"
        else:
            base, memory = self.names[place.temporary], place.temporary.example
        if isinstance(memory, Tensor) and memory.dtype == x.dtype:
            if not place.offset and _layout(x) == _layout(memory):
                return base
            return f"strided({base}, {layout}, {place.offset // x.element_size()})"
        return f"view({base}, {place.offset}, {self.constant(x.dtype)}, {layout})"

    def allocation(self, one: Temporary) -> str:
        x, device = one.example, self.constant(one.device)
        dtype = self.constant(x.dtype)
        return f"empty_strided({tuple(x.shape)}, {x.stride()}, dtype={dtype}, device={device})"


def _function(event: Event) -> Callable[..., object]:
    """What an event calls; not OpOverload.__call__, whose Python takes longer than many an op."""
    if isinstance(event, Call) and type(event.function) is OpOverload:
        return event.function._op
    return event.function


def _tensors(items: Any, twins: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """The tensors in an argument, each with that at the same place of its twin."""
    if isinstance(items, Tensor) and isinstance(twins, Tensor):
        yield items, twins
    elif isinstance(items, Mapping) and isinstance(twins, Mapping):
        for name in items.keys() & twins.keys():
            yield from _tensors(items[name], twins[name])
    elif isinstance(items, list | tuple) and isinstance(twins, list | tuple):
        for pair in zip(items, twins, strict=False):
            yield from _tensors(*pair)


def _layout(x: Tensor) -> tuple[Sequence[int], Sequence[int]]:
    return x.shape, x.stride()


def _view(
    base: Tensor, offset: int, dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int]
) -> Tensor:
    """A view of the memory of `base`. offset: in bytes from its first element."""
    start = base.storage_offset() * base.element_size() + offset
    x = torch.empty(0, dtype=dtype, device=base.device)
    return x.set_(base.untyped_storage(), start // dtype.itemsize, shape, stride)
