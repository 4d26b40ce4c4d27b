"""Delays signals whose handlers raise, such as Ctrl-C, while work must not stop half way."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)


class Interrupts:
    """The signals received in a context of `interrupts_delayed`."""

    def __init__(self) -> None:
        handlers = {int(number): signal.getsignal(number) for number in SIGNALS}
        self._handlers = {
            number: handler for number, handler in handlers.items() if callable(handler)
        }
        self._received: list[tuple[int, FrameType | None]] = []
        for number in self._handlers:
            signal.signal(number, self.receive)

    def receive(self, number: int, frame: FrameType | None) -> None:
        """Keep the signal. A second Ctrl-C is not delayed: the work may hang."""
        if number == signal.SIGINT and any(number == other for other, _ in self._received):
            self._handlers[number](number, frame)
        self._received.append((number, frame))

    def deliver(self) -> None:
        """Call the handlers of the signals received so far. They may raise."""
        while self._received:
            number, frame = self._received.pop(0)
            self._handlers[number](number, frame)

    def restore(self) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)


@contextmanager
def interrupts_delayed() -> Iterator[Interrupts | None]:
    """Call the handlers of signals at the end of this context, or of the outermost one, and where
    `deliver` is called; also a decorator. None in other threads, which receive no signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield None
        return
    outer = getattr(signal.getsignal(signal.SIGINT), "__self__", None)
    if isinstance(outer, Interrupts):
        yield outer
        return
    interrupts = Interrupts()
    try:
        yield interrupts
    finally:
        interrupts.restore()
        interrupts.deliver()
