"""The text of one answer, as it streams, made into reasoning, content and calls of tools."""

from typing import Any

from atomc.runtime.server.pieces import Content, Parser, Piece, joined


class Answer:
    """The reasoning parser reads the text, and the tool parser what is content to it; either may be None."""

    def __init__(self, reasoning: Parser | None, tools: Parser | None) -> None:
        self._reasoning = reasoning
        self._tools = tools

    def feed(self, text: str) -> list[Piece]:
        return self._called(self._reasoning.feed(text) if self._reasoning else [Content(text)] if text else [])

    def finish(self) -> list[Piece]:
        pieces = self._called(self._reasoning.finish()) if self._reasoning else []
        return joined(pieces + (self._tools.finish() if self._tools else []))

    def _called(self, pieces: list[Piece]) -> list[Piece]:
        if self._tools is None:
            return pieces
        found: list[Piece] = []
        for piece in pieces:
            found += self._tools.feed(piece.text) if isinstance(piece, Content) else [piece]
        return joined(found)


def hides_markers(tokenizer: Any, *parsers: Parser | None) -> bool:
    """Whether text without special tokens lacks what these parsers look for: then it must be made with them."""
    markers = {marker for parser in parsers if parser is not None for marker in parser.markers}
    return any(token.special and token.content in markers for token in tokenizer.get_added_tokens_decoder().values())
