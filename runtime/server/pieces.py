"""What the text of a model means to the client, as it streams: reasoning, content, and calls of tools."""

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol


@dataclass(frozen=True)
class Reasoning:
    """Text that the model thought."""

    text: str


@dataclass(frozen=True)
class Content:
    """Text that the model said."""

    text: str


@dataclass(frozen=True)
class ToolStart:
    """Call number `index` of the answer begins. Its arguments follow."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class ToolArguments:
    """More of the arguments of call number `index`: JSON text as the model wrote it."""

    index: int
    text: str


Piece = Reasoning | Content | ToolStart | ToolArguments


class Parser(Protocol):
    """From the text of one answer, as it streams, to pieces; their sum does not depend on how the text was cut.

    markers  texts of its format that may be special tokens: then the text must be made with them
    """

    markers: ClassVar[tuple[str, ...]]

    def feed(self, text: str) -> list[Piece]:
        """The pieces that this text completes."""

    def finish(self) -> list[Piece]:
        """What was held back; the text has ended."""


def call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


def joined(pieces: Sequence[Piece]) -> list[Piece]:
    """The same with neighbours of one kind as one."""
    found: list[Piece] = []
    for piece in pieces:
        last = found[-1] if found else None
        # Arguments of two calls are never neighbours: a ToolStart is between them.
        if last is None or isinstance(piece, ToolStart) or type(last) is not type(piece):
            found.append(piece)
        else:
            found[-1] = replace(last, text=last.text + piece.text)
    return found


class Pieces:
    """Pieces in the making: counts the calls, and leaves out the white space around them."""

    def __init__(self, new_id: Callable[[], str] = call_id) -> None:
        self.num_calls = 0
        self._new_id = new_id
        self._pieces: list[Piece] = []
        self._space = ""  # at the end of the content so far: left out if a call comes next

    def content(self, text: str) -> None:
        text = self._space + text
        said = text.rstrip()
        self._space = text[len(said) :]
        self._add(Content(said))

    def reasoning(self, text: str) -> None:
        self._add(Reasoning(text))

    def call(self, name: str) -> None:
        self._space = ""
        self._pieces.append(ToolStart(self.num_calls, self._new_id(), name))
        self.num_calls += 1

    def arguments(self, text: str) -> None:
        """Of the call that was started last."""
        self._add(ToolArguments(self.num_calls - 1, text))

    def finish(self) -> None:
        if not self.num_calls:
            self._add(Content(self._space))
        self._space = ""

    def take(self) -> list[Piece]:
        """What has been added since the last time."""
        taken, self._pieces = joined(self._pieces), []
        return taken

    def _add(self, piece: Reasoning | Content | ToolArguments) -> None:
        if piece.text:
            self._pieces.append(piece)
