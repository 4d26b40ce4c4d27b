"""Base classes of tool call parsers: state machines over a text buffer."""

from collections.abc import Callable

from atomc.runtime.server.parsers.message_deltas import DeltaBuilder, MessageDelta
from atomc.runtime.server.parsers.text_buffer import TextBuffer
from atomc.runtime.server.parsers.tool_parsers.json_call import JsonScanner


class StateMachineParser:
    """A Parser whose `_state` is called while there is text. A state returns False if it needs more
    text.

    A subclass implements the states `_read_content`, the first one, and `_end_call`.
    """

    def __init__(self) -> None:
        self._text = TextBuffer()
        self._deltas = DeltaBuilder()
        self._raw: list[str] = []  # becomes content if this is not a call
        self._state: Callable[[], bool] = self._read_content

    def feed(self, text: str) -> list[MessageDelta]:
        self._text.feed(text)
        while self._text and self._state():
            pass
        return self._deltas.take()

    def finish(self) -> list[MessageDelta]:
        self._finish_content("".join((*self._raw, self._text.take_all())))
        self._deltas.finish()
        return self._deltas.take()

    def _enter(self, state: Callable[[], bool], raw: str = "") -> None:
        """Go on in this state, with the text `raw` taken, which may become content."""
        self._state, self._raw = state, [raw] if raw else []

    def _content(self, state: Callable[[], bool], text: str = "") -> None:
        """The text taken, and this text, are content. Go on in this state."""
        self._deltas.content("".join((*self._raw, text)))
        self._enter(state)

    def _finish_content(self, rest: str) -> None:
        """Add what is left of the text to the deltas; after a call, drop it."""
        if self._state != self._end_call:
            self._deltas.content(rest)

    def _read_content(self) -> bool:
        """The state outside of calls."""
        raise NotImplementedError

    def _end_call(self) -> bool:
        """The state after a call, or after its arguments."""
        raise NotImplementedError


class ArgumentsStateMachine(StateMachineParser):
    """A StateMachineParser of calls whose name stands before the arguments."""

    _arguments: JsonScanner

    def _start_call(self, name: str) -> None:
        """The arguments follow."""
        self._deltas.call(name)
        self._arguments = JsonScanner()
        self._enter(self._read_arguments)

    def _read_arguments(self) -> bool:
        self._deltas.arguments(self._text.take_read(self._arguments.feed))
        ended = self._arguments.done or self._arguments.stopped
        if ended:
            self._state = self._end_call
        return ended
