"""Splits the streamed text of one choice into reasoning, content and tool calls."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from atomc.runtime.server.parsers.message_deltas import (
    ContentDelta,
    MessageDelta,
    Parser,
    merge_deltas,
)

if TYPE_CHECKING:  # optional
    from tokenizers import Tokenizer


@dataclass
class OutputParser:
    """Feeds the text to the reasoning parser, and the content it returns to the tool parser; either
    may be None.
    """

    _reasoning: Parser | None
    _tools: Parser | None

    @property
    def parsers(self) -> Sequence[Parser | None]:
        return self._reasoning, self._tools

    def feed(self, text: str) -> list[MessageDelta]:
        if not text:
            return []
        return self._parse_tool_calls(
            self._reasoning.feed(text) if self._reasoning else [ContentDelta(text)]
        )

    def finish(self) -> list[MessageDelta]:
        deltas = self._parse_tool_calls(self._reasoning.finish()) if self._reasoning else []
        return merge_deltas(deltas + (self._tools.finish() if self._tools else []))

    def _parse_tool_calls(self, deltas: list[MessageDelta]) -> list[MessageDelta]:
        if self._tools is None:
            return deltas
        parsed: list[MessageDelta] = []
        for delta in deltas:
            parsed += self._tools.feed(delta.text) if isinstance(delta, ContentDelta) else [delta]
        return merge_deltas(parsed)


def uses_special_tokens(tokenizer: "Tokenizer", *parsers: Parser | None) -> bool:
    """Whether a marker of these parsers has a special token, which the text must then include."""
    markers = {marker for parser in parsers if parser is not None for marker in parser.markers}
    return any(token in marker for token in special_tokens(tokenizer) for marker in markers)


def special_tokens(tokenizer: "Tokenizer") -> dict[str, int]:
    """The ids of the special tokens, by text."""
    tokens = tokenizer.get_added_tokens_decoder().items()
    return {token.content: number for number, token in tokens if token.special and token.content}
