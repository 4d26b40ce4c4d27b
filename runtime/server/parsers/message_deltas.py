"""Deltas of a chat message: reasoning, content and tool calls."""

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Protocol


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

    @property
    def markers(self) -> tuple[str, ...]:
        """Words of the format."""

    def feed(self, text: str) -> list[MessageDelta]:
        """The deltas that this text completes."""

    def finish(self) -> list[MessageDelta]:
        """The remaining deltas, at the end of the text."""


def call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


def merge_deltas(deltas: Sequence[MessageDelta]) -> list[MessageDelta]:
    """Merges adjacent deltas of the same type."""
    merged: list[MessageDelta] = []
    # A ToolCallStart separates the arguments of two calls, so they are never merged.
    for _, group in groupby(deltas, type):
        match list(group):
            case [ToolCallStart(), *_] as starts:
                merged += starts
            case [ReasoningDelta() | ContentDelta() | ToolCallArguments() as first, *_] as alike:
                text = "".join(
                    delta.text for delta in alike if not isinstance(delta, ToolCallStart)
                )
                merged.append(replace(first, text=text))
    return merged


class DeltaBuilder:
    """Collects deltas, numbers the tool calls and removes white space around them."""

    def __init__(self) -> None:
        self.num_calls = 0
        self._deltas: list[MessageDelta] = []
        # Trailing white space of the content, dropped if a call follows.
        self._space: list[str] = []

    def content(self, text: str) -> None:
        stripped = text.rstrip()
        if stripped:
            self._add(ContentDelta("".join((*self._space, stripped))))
            self._space.clear()
        self._space.append(text[len(stripped) :])

    def reasoning(self, text: str) -> None:
        self._add(ReasoningDelta(text))

    def call(self, name: str) -> None:
        self._space.clear()
        self._deltas.append(ToolCallStart(self.num_calls, call_id(), name))
        self.num_calls += 1

    def arguments(self, text: str) -> None:
        """Add arguments to the latest call."""
        self._add(ToolCallArguments(self.num_calls - 1, text))

    def finish(self) -> None:
        if not self.num_calls:
            self._add(ContentDelta("".join(self._space)))
        self._space.clear()

    def take(self) -> list[MessageDelta]:
        """The deltas added since the last call."""
        taken, self._deltas = merge_deltas(self._deltas), []
        return taken

    def _add(self, delta: ReasoningDelta | ContentDelta | ToolCallArguments) -> None:
        if delta.text:
            self._deltas.append(delta)
