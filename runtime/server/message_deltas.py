"""Deltas of a chat message: reasoning, content and tool calls."""

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol


@dataclass(frozen=True)
class ReasoningDelta:
    """More of the reasoning."""

    text: str


@dataclass(frozen=True)
class ContentDelta:
    """More of the content."""

    text: str


@dataclass(frozen=True)
class ToolCallStart:
    """Start of tool call number `index`. Its arguments follow."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class ToolCallArguments:
    """More of the arguments of tool call number `index`: JSON text as the model wrote it."""

    index: int
    text: str


MessageDelta = ReasoningDelta | ContentDelta | ToolCallStart | ToolCallArguments


class Parser(Protocol):
    """Converts the streamed text of one choice to deltas. Their concatenation does not depend on
    how the text is split.

    markers   delimiters of the format; those that are special tokens must be kept in the text
    """

    markers: ClassVar[tuple[str, ...]]

    def feed(self, text: str) -> list[MessageDelta]:
        """The deltas that this text completes."""

    def finish(self) -> list[MessageDelta]:
        """The remaining deltas, at the end of the text."""


def call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


def merge_deltas(deltas: Sequence[MessageDelta]) -> list[MessageDelta]:
    """Merges adjacent deltas of the same type."""
    found: list[MessageDelta] = []
    for delta in deltas:
        last = found[-1] if found else None
        # A ToolCallStart separates the arguments of two calls, so they are never merged.
        if last is None or isinstance(delta, ToolCallStart) or type(last) is not type(delta):
            found.append(delta)
        else:
            found[-1] = replace(last, text=last.text + delta.text)
    return found


class DeltaBuilder:
    """Collects deltas, numbers the tool calls and removes white space around them."""

    def __init__(self, new_id: Callable[[], str] = call_id) -> None:
        self.num_calls = 0
        self._new_id = new_id
        self._deltas: list[MessageDelta] = []
        self._space = ""  # trailing white space of the content, dropped if a call follows

    def content(self, text: str) -> None:
        text = self._space + text
        stripped = text.rstrip()
        self._space = text[len(stripped) :]
        self._add(ContentDelta(stripped))

    def reasoning(self, text: str) -> None:
        self._add(ReasoningDelta(text))

    def call(self, name: str) -> None:
        self._space = ""
        self._deltas.append(ToolCallStart(self.num_calls, self._new_id(), name))
        self.num_calls += 1

    def arguments(self, text: str) -> None:
        """Add arguments to the latest call."""
        self._add(ToolCallArguments(self.num_calls - 1, text))

    def finish(self) -> None:
        if not self.num_calls:
            self._add(ContentDelta(self._space))
        self._space = ""

    def take(self) -> list[MessageDelta]:
        """The deltas added since the last call."""
        taken, self._deltas = merge_deltas(self._deltas), []
        return taken

    def _add(self, delta: ReasoningDelta | ContentDelta | ToolCallArguments) -> None:
        if delta.text:
            self._deltas.append(delta)
