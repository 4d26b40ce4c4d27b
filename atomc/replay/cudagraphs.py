"""CUDA graphs: static inputs, a shared memory pool, capture and replay, for the backend and the
runtime.

A captured call reads its inputs at their addresses during capture. HIP graphs on ROCm use the same
torch functions.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch
from torch import Tensor

from atomc.errors import first_line
from atomc.replay.static_buffer import StaticBuffer, fill
from atomc.torch_compat.captured_kernels import capture_into
from atomc.torch_compat.core import (
    GraphFunction,
    Input,
    Outputs,
    addresses,
    are_at,
    is_static_input,
    without_torch_functions,
)

T = TypeVar("T")
MOST_GRAPHS = 32
# Calls of the same shapes before a capture: Triton compiles, Inductor measures, libraries allocate
# their workspaces, kernels are loaded, and by then a capture can repeat what a call launches.
CALLS_BEFORE_CAPTURE = 3
MOST_KEYS = 1024  # whose calls are counted
# The kinds of the copied inputs: shapes and layouts, or values of numbers.
Key = tuple[Hashable, ...]
# Of the report: the shapes of the copied inputs, and the bytes of a graph.
GraphRecord = dict[str, int | list[list[int]]]
Capturing = Callable[[], AbstractContextManager[object]]


@dataclass
class CapturedCall(Generic[T]):
    """One captured call.

    output  what each replay overwrites
    bytes   memory that the capture added to the pool
    """

    graph: torch.cuda.CUDAGraph
    output: T
    bytes: int

    def replay(self) -> T:
        self.graph.replay()
        return self.output


class Pool:
    """Captures calls into one memory pool. The graphs share temporaries, so only one may run at a
    time, and a graph may overwrite the results of those that were captured after it.

    capturing  the context of each capture, but not of the call before it
    bytes      memory that the captured calls take
    """

    def __init__(self, device: torch.device | str = "cuda", capturing: Capturing = nullcontext):
        self.device, self.capturing = torch.device(device), capturing
        self.handle = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self.bytes = 0

    def capture(self, call: Callable[[], T], *, warm_up: bool = True) -> CapturedCall[T]:
        """Capture `call`, whose inputs must keep their addresses. Raises its first error if it
        cannot be captured.

        warm_up  call it once before, so that Triton compiles, Inductor measures and cuBLAS
                 allocates its workspace. Not needed if all kernels have run before an earlier
                 capture: they are loaded on demand.
        """
        with torch.cuda.device(self.device):
            self.stream.wait_stream(torch.cuda.current_stream())
            graph = torch.cuda.CUDAGraph()
            # torch.cuda.graph() would synchronize and release all cached memory before each
            # capture.
            with torch.cuda.stream(self.stream):
                if warm_up:
                    call()
                before = torch.cuda.memory_reserved(self.device)
                # "relaxed" lets a kernel be loaded during capture.
                mode = "global" if warm_up else "relaxed"
                with self.capturing():
                    output = capture_into(graph, call, pool=self.handle, capture_error_mode=mode)
            torch.cuda.current_stream().wait_stream(self.stream)
        size = max(0, torch.cuda.memory_reserved(self.device) - before)
        self.bytes += size
        return CapturedCall(graph, output, size)


@dataclass(eq=False)
class Graphed:
    """A callable that replays one graph per set of input shapes.

    Parameters and inputs marked as static keep their addresses. Other tensors are copied into
    static buffers before a replay, and results are cloned, so that the caller may keep them. A call
    that cannot be captured runs without a graph, with a note, as do the first ones of its shapes.
    Static inputs at other addresses, as of the cache of a new `generate`, replace the graph.

    settle   called with the inputs before a capture; it may move the static ones, whose addresses
             identify a graph
    """

    call: GraphFunction
    written: Sequence[int]
    notes: list[str]
    graphs: list[GraphRecord]
    settle: Callable[[Sequence[Input]], Sequence[Tensor]] = lambda args: ()
    pool: Pool | None = None
    static: list[int] | None = None  # set by the first call
    copied: list[int] = field(default_factory=list)
    captured: dict[Key, "_GraphEntry | None"] = field(default_factory=dict)
    calls: Counter[Key] = field(default_factory=Counter)  # before a capture

    def __call__(self, *args: Input) -> Outputs:
        if self.static is None:
            self._find_static(args)
        # A default device is a mode that each call of a tensor's method would pass through.
        with without_torch_functions():
            # Most are numbers: a call of `_kind` costs more than what it returns.
            key = tuple([x if type(x := args[i]) is int else _kind(x) for i in self.copied])
            is_captured = key in self.captured and self._fits(self.captured[key], args)
        entry = self.captured[key] if is_captured else self._new_entry(key, args)
        if entry is None:
            return self.call(*args)
        with without_torch_functions():
            return _replayed(entry, args)

    def _find_static(self, args: Sequence[Input]) -> None:
        static = [
            isinstance(x, Tensor) and (i in self.written or is_static_input(x))
            for i, x in enumerate(args)
        ]
        self.static = [i for i, fixed in enumerate(static) if fixed]
        self.copied = [i for i, fixed in enumerate(static) if not fixed]

    def _new_entry(self, key: Key, args: Sequence[Input]) -> "_GraphEntry | None":
        """A graph for inputs of these shapes and addresses, for which there is none; None if they
        are not captured.
        """
        reason = self._refused(key, args)
        if reason is None:
            if len(self.calls) > MOST_KEYS:  # of calls that did not come again
                self.calls.clear()
            self.calls[key] += 1
            if self.calls[key] <= CALLS_BEFORE_CAPTURE:
                return None
            self.settle(args)
            last = self.captured.get(key)
            if last is not None:
                if self._fits(last, args):
                    return last
                self.graphs.remove(last.record)
            try:
                entry = self.captured[key] = self._recorded(args)
                return entry
            except RuntimeError as error:
                reason = first_line(error) or type(error).__name__
        self.captured[key] = None
        note = f"no CUDA graph: {reason}"
        if note not in self.notes:
            self.notes.append(note)
        return None

    def _fits(self, entry: "_GraphEntry | None", args: Sequence[Input]) -> bool:
        return entry is None or are_at([*args], entry.addresses, self.static or [])

    def _refused(self, key: Key, args: Sequence[Input]) -> str | None:
        devices = _devices(args)
        if [device.type for device in devices] != ["cuda"]:
            return f"inputs on {', '.join(sorted(map(str, devices))) or 'no device'}"
        graphs = sum(entry is not None for entry in self.captured.values())
        if key not in self.captured and graphs >= MOST_GRAPHS:
            return f"there are {MOST_GRAPHS} already, for other {self._varying()}"
        return None

    def _varying(self) -> str:
        """What distinguishes the captured calls."""
        by_input = zip(*self.captured, strict=True)
        varying = [i for i, kinds in zip(self.copied, by_input, strict=True) if len({*kinds}) > 1]
        return f"values or shapes of the inputs {', '.join(map(str, varying))}"

    def _recorded(self, args: Sequence[Input]) -> "_GraphEntry":
        buffers = {i: StaticBuffer(x) for i in self.copied if isinstance(x := args[i], Tensor)}
        static = list(args)
        for i, buffer in buffers.items():
            static[i] = buffer.tensor
        self.pool = self.pool or Pool(_devices(args).pop())
        captured = self.pool.capture(lambda: self.call(*static), warm_up=False)
        shapes = [list(buffer.tensor.shape) for buffer in buffers.values()]
        record: GraphRecord = {"inputs": shapes, "bytes": captured.bytes}
        self.graphs.append(record)
        return _GraphEntry(captured, buffers, addresses(args), record)


def why_syncing(kernels: Sequence[str]) -> str:
    """Why calls with these kernels, or ops, cannot be captured."""
    return f"{', '.join(kernels)} wait for the device"


def _devices(args: Sequence[Input]) -> set[torch.device]:
    return {x.device for x in args if isinstance(x, Tensor) and x.dim()}


@dataclass
class _GraphEntry:
    """A captured call, the buffers of copied inputs by their numbers, the addresses of the inputs,
    of which static ones must stay, and what the report says of it.
    """

    graph: CapturedCall[Outputs]
    buffers: dict[int, StaticBuffer]
    addresses: list[int | None]
    record: GraphRecord


def _replayed(entry: _GraphEntry, args: Sequence[Input]) -> Outputs:
    """The results for these inputs, by the graph."""
    copied = [x for i in entry.buffers if isinstance(x := args[i], Tensor)]
    fill([*entry.buffers.values()], copied)
    return _cloned(entry.graph.replay())


def _kind(x: Input) -> Hashable:
    if not isinstance(x, Tensor):
        return x
    # A graph keeps the value of a tensor on the host, which kernels take by value.
    number = repr(x.item()) if x.dim() == 0 and x.device.type == "cpu" else None
    return x.shape, x.dtype, x.stride(), x.device, number


def _cloned(output: Outputs) -> Outputs:
    if isinstance(output, Tensor):
        return output.clone()
    if isinstance(output, list | tuple):
        return type(output)([x if type(x) is int else _cloned(x) for x in output])
    return output
