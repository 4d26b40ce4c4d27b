"""CUDA graphs: static inputs, one shared pool, capture, replay, bytes. The backend and the runtime
both use this.

A captured call reads its inputs where they lay during capture; HIP graphs on ROCm go through the
same torch functions.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from atomc.compiler.static_buffer import StaticBuffer
from atomc.torch_compat.core import is_static_input

MOST_GRAPHS = 32


@dataclass
class Captured:
    """One captured call. `output` is where each replay writes; bytes is what capturing added to the
    pool.
    """

    graph: torch.cuda.CUDAGraph
    output: Any
    bytes: int

    def replay(self) -> Any:
        self.graph.replay()
        return self.output


class Pool:
    """Captures calls one after another into one memory pool: graphs that never run at once share
    their temporaries.
    """

    def __init__(self, device: torch.device | str = "cuda"):
        self.device = torch.device(device)
        self.handle = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self.num_graphs = 0

    def capture(self, call: Callable[[], Any], *, warm_up: bool = True) -> Captured:
        """Capture `call`, whose inputs must stay where they are. Raises what CUDA raises if it
        cannot be captured.

        warm_up  call it once before: Triton compiles, Inductor measures, cuBLAS allocates its
                 workspace. Not needed where an earlier capture was warmed up and all kernels have
                 run: they are loaded as they come.
        """
        with torch.cuda.device(self.device):
            self.stream.wait_stream(torch.cuda.current_stream())
            graph = torch.cuda.CUDAGraph()
            # Not torch.cuda.graph(), which waits for the device and gives all free memory back
            # before each capture.
            with torch.cuda.stream(self.stream):
                if warm_up:
                    call()
                before = torch.cuda.memory_reserved(self.device)
                # "relaxed" lets a kernel be loaded during capture.
                graph.capture_begin(
                    pool=self.handle, capture_error_mode="global" if warm_up else "relaxed"
                )
                try:
                    output = call()
                finally:
                    graph.capture_end()
            torch.cuda.current_stream().wait_stream(self.stream)
        self.num_graphs += 1
        return Captured(graph, output, max(0, torch.cuda.memory_reserved(self.device) - before))


class Graphed:
    """A callable that replays a graph per set of input shapes; parameters and marked inputs stay
    where they are.

    Other tensors are copied into static buffers before a replay, and results are copied out, so
    that the caller may keep them. Whatever cannot be captured runs as it is, with a note.

    settle   called with the inputs before a capture: it may move those that stay, by whose
             addresses graphs are told apart
    """

    def __init__(
        self,
        call: Callable[..., Any],
        written: Sequence[int],
        notes: list[str],
        graphs: list[dict[str, Any]],
        settle: Callable[[Sequence[Any]], Any] = lambda args: None,
    ):
        self.settle = settle
        self.call, self.written, self.notes, self.graphs = call, sorted(written), notes, graphs
        self.pool: Pool | None = None
        self.staying: list[int] | None = (
            None  # the inputs that must not move; known from the first call on
        )
        self.moving: list[int] = []
        self.captured: dict[Any, _Entry | None] = {}

    def __call__(self, *args: Any) -> Any:
        if self.staying is None:
            self._fix_staying(args)
        entry = self._entry(args)
        if entry is None:
            return self.call(*args)
        for buffer, i in entry.copied:
            buffer.fill(args[i])
        return _cloned(entry.graph.replay())

    def _fix_staying(self, args: Sequence[Any]) -> None:
        stays = [
            isinstance(x, Tensor) and (i in self.written or is_static_input(x))
            for i, x in enumerate(args)
        ]
        self.staying = [i for i, fixed in enumerate(stays) if fixed]
        self.moving = [i for i, fixed in enumerate(stays) if not fixed]

    def _entry(self, args: Sequence[Any]) -> "_Entry | None":
        """The graph for these inputs, captured if there is none for where they lie; None: they
        cannot be captured.
        """
        key = tuple([_kind(args[i]) for i in self.moving])
        if key in self.captured and self._fits(self.captured[key], args):
            return self.captured[key]
        self.settle(args)
        if key not in self.captured or not self._fits(self.captured[key], args):
            self.captured[key] = self._capture(args)
        return self.captured[key]

    def _fits(self, entry: "_Entry | None", args: Sequence[Any]) -> bool:
        return entry is None or entry.pointers == self._pointers(args)

    def _pointers(self, args: Sequence[Any]) -> list[int]:
        return [args[i].data_ptr() for i in self.staying or ()]

    def _capture(self, args: Sequence[Any]) -> "_Entry | None":
        reason = self._refused(args)
        if reason is None:
            with _restored([args[i] for i in self.written]):  # warm-up runs write, too
                try:
                    return self._recorded(args)
                except RuntimeError as error:
                    reason = str(error).splitlines()[0]
        note = f"no CUDA graph: {reason}"
        if note not in self.notes:
            self.notes.append(note)
        return None

    def _refused(self, args: Sequence[Any]) -> str | None:
        devices = _devices(args)
        if [device.type for device in devices] != ["cuda"]:
            return f"inputs on {', '.join(sorted(map(str, devices))) or 'no device'}"
        if len(self.captured) >= MOST_GRAPHS:
            return f"there are {MOST_GRAPHS} already"
        return None

    def _recorded(self, args: Sequence[Any]) -> "_Entry":
        copied = [(StaticBuffer(args[i]), i) for i in self.moving if isinstance(args[i], Tensor)]
        static = list(args)
        for buffer, i in copied:
            static[i] = buffer.tensor
        self.pool = self.pool or Pool(_devices(args).pop())
        captured = self.pool.capture(lambda: self.call(*static))
        self.graphs.append(
            {"inputs": [list(args[i].shape) for _, i in copied], "bytes": captured.bytes}
        )
        return _Entry(captured, copied, self._pointers(args))


def _devices(args: Sequence[Any]) -> set[torch.device]:
    return {x.device for x in args if isinstance(x, Tensor) and x.dim()}


@contextmanager
def _restored(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Afterwards the tensors hold what they held before."""
    saved = [tensor.clone() for tensor in tensors]
    try:
        yield
    finally:
        for kept, tensor in zip(saved, tensors, strict=True):
            tensor.copy_(kept)


@dataclass
class _Entry:
    """A captured call, the buffers that inputs are copied into, and where the other inputs lay."""

    graph: Captured
    copied: list[tuple[StaticBuffer, int]]
    pointers: list[int]


def _kind(x: Any) -> Any:
    if not isinstance(x, Tensor):
        return x
    # Kernels take a number on the host by value, and a graph keeps the one it was captured with.
    number = repr(x.item()) if x.dim() == 0 and x.device.type == "cpu" else None
    return x.shape, x.dtype, x.stride(), x.device, number


def _cloned(output: Any) -> Any:
    if isinstance(output, Tensor):
        return output.clone()
    if isinstance(output, list | tuple):
        return type(output)(_cloned(item) for item in output)
    return output
