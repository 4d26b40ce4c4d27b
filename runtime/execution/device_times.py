"""How long the device runs steps, and how long it waits for the host meanwhile."""

import time
from collections import deque
from typing import Any

import torch


class HostEvent:
    """A moment of a CPU, where the host itself computes a step, with the methods of a CUDA event
    that are used here.
    """

    def __init__(self) -> None:
        self._seconds = 0.0

    def record(self, stream: None) -> None:
        self._seconds = time.perf_counter()

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: "HostEvent") -> float:
        """Milliseconds until `end`."""
        return 1e3 * (end._seconds - self._seconds)


class DeviceTimes:
    """Seconds since the start, from events that the device records in the stream of its steps.

    The device is busy from `begin` to `end`, a span, and idle between two spans, except for the
    time after `pause`. A step has two spans, because the host may compute a mask between its
    forward pass and its sampling. Reading does not wait: a span counts once the device has reached
    its end. A CPU is busy while the host computes a span.

    busy, idle   seconds
    """

    def __init__(self, device: torch.device) -> None:
        self.busy = self.idle = 0.0
        self._device = device
        # Events, of CUDA or of the host.
        self._unused: list[Any] = []
        self._open: Any = None  # the begin of a span without end
        self._spans: deque[tuple[Any, Any]] = deque()
        self._last: Any = None  # the end of the span that was counted last

    def begin(self) -> None:
        """Begin a span with what is launched next, unless one has begun."""
        if self._open is None:
            self._open = self._record()

    def end(self) -> None:
        """End the span after what was launched last, if one has begun."""
        if self._open is not None:
            self._spans.append((self._open, self._record()))
            self._open = None

    def read(self) -> None:
        """Count the spans that the device has finished."""
        while self._spans and self._spans[0][1].query():
            begin, end = self._spans.popleft()
            self.busy += 1e-3 * begin.elapsed_time(end)
            if self._last is not None:
                self.idle += 1e-3 * self._last.elapsed_time(begin)
                self._unused.append(self._last)
            self._unused.append(begin)
            self._last = end

    def pause(self) -> None:
        """There were no requests: the time before the next span is not idle."""
        self.read()
        self._spans.clear()
        self._open = self._last = None

    def forget(self) -> None:
        """Begin at 0."""
        self.pause()
        self.busy = self.idle = 0.0

    def _record(self) -> Any:
        on_gpu = self._device.type == "cuda"
        if self._unused:
            event = self._unused.pop()
        else:
            event = torch.cuda.Event(enable_timing=True) if on_gpu else HostEvent()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device) if on_gpu else None)
        return event
