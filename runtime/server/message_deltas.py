"""What the text of a model means to the client, as it streams: reasoning, content, and calls of tools."""

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol


@dataclass(frozen=True)
class ReasoningDelta:
    """Text that the model thought."""

    text: str


@dataclass(frozen=True)
class ContentDelta:
    """Text that the model said."""

    text: str


@dataclass(frozen=True)
class ToolCallStart:
    """Call number `index` of the answer begins. Its arguments follow."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class ToolCallArguments:
    """More of the arguments of call number `index`: JSON text as the model wrote it."""

    index: int
    text: str


MessageDelta = ReasoningDelta | ContentDelta | ToolCallStart | ToolCallArguments


class Parser(Protocol):
    """From the text of one answer, as it streams, to pieces; their sum does not depend on how the text was cut.

    markers  texts of its format that may be special tokens: then the text must be made with them
    """

    markers: ClassVar[tuple[str, ...]]

    def feed(self, text: str) -> list[MessageDelta]:
        """The pieces that this text completes."""

    def finish(self) -> list[MessageDelta]:
        """What was held back; the text has ended."""


def call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


def merge_deltas(deltas: Sequence[MessageDelta]) -> list[MessageDelta]:
    """The same with neighbours of one kind as one."""
    found: list[MessageDelta] = []
    for delta in deltas:
        last = found[-1] if found else None
        # Arguments of two calls are never neighbours: a ToolStart is between them.
        if last is None or isinstance(delta, ToolCallStart) or type(last) is not type(delta):
            found.append(delta)
        else:
            found[-1] = replace(last, text=last.text + delta.text)
    return found


class DeltaBuilder:
    """Pieces in the making: counts the calls, and leaves out the white space around them."""

    def __init__(self, new_id: Callable[[], str] = call_id) -> None:
        self.num_calls = 0
        self._new_id = new_id
        self._deltas: list[MessageDelta] = []
        self._space = ""  # at the end of the content so far: left out if a call comes next

    def content(self, text: str) -> None:
        text = self._space + text
        said = text.rstrip()
        self._space = text[len(said) :]
        self._add(ContentDelta(said))

    def reasoning(self, text: str) -> None:
        self._add(ReasoningDelta(text))

    def call(self, name: str) -> None:
        self._space = ""
        self._deltas.append(ToolCallStart(self.num_calls, self._new_id(), name))
        self.num_calls += 1

    def arguments(self, text: str) -> None:
        """Of the call that was started last."""
        self._add(ToolCallArguments(self.num_calls - 1, text))

    def finish(self) -> None:
        if not self.num_calls:
            self._add(ContentDelta(self._space))
        self._space = ""

    def take(self) -> list[MessageDelta]:
        """What has been added since the last time."""
        taken, self._deltas = merge_deltas(self._deltas), []
        return taken

    def _add(self, delta: ReasoningDelta | ContentDelta | ToolCallArguments) -> None:
        if delta.text:
            self._deltas.append(delta)
