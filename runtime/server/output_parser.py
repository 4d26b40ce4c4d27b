"""The text of one answer, as it streams, made into reasoning, content and calls of tools."""

from typing import Any

from atomc.runtime.server.message_deltas import ContentDelta, MessageDelta, Parser, merge_deltas


class OutputParser:
    """The reasoning parser reads the text, and the tool parser what is content to it; either may be None."""

    def __init__(self, reasoning: Parser | None, tools: Parser | None) -> None:
        self._reasoning = reasoning
        self._tools = tools

    def feed(self, text: str) -> list[MessageDelta]:
        if not text:
            return []
        return self._parse_tool_calls(self._reasoning.feed(text) if self._reasoning else [ContentDelta(text)])

    def finish(self) -> list[MessageDelta]:
        deltas = self._parse_tool_calls(self._reasoning.finish()) if self._reasoning else []
        return merge_deltas(deltas + (self._tools.finish() if self._tools else []))

    def _parse_tool_calls(self, deltas: list[MessageDelta]) -> list[MessageDelta]:
        if self._tools is None:
            return deltas
        found: list[MessageDelta] = []
        for delta in deltas:
            found += self._tools.feed(delta.text) if isinstance(delta, ContentDelta) else [delta]
        return merge_deltas(found)


def uses_special_tokens(tokenizer: Any, *parsers: Parser | None) -> bool:
    """Whether text without special tokens lacks what these parsers look for: then it must be made with them."""
    markers = {marker for parser in parsers if parser is not None for marker in parser.markers}
    return any(token.special and token.content in markers for token in tokenizer.get_added_tokens_decoder().values())
