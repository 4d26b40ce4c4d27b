"""Parsers of what a model thinks before it answers: from its text, as it streams, to Reasoning and Content."""

from collections.abc import Callable, Mapping
from typing import ClassVar

from atomc.runtime.server.message_deltas import ContentDelta, MessageDelta, Parser, ReasoningDelta, merge_deltas
from atomc.runtime.server.text_buffer import TextBuffer, partial_marker_length
from atomc.runtime.server.tool_parsers.harmony import CHANNEL, START, HarmonyParser

OPEN, CLOSE = "<think>", "</think>"


class ThinkParser:
    """<think>...</think> at the beginning of the answer, as Qwen3, DeepSeek-R1 and QwQ write it.

    prompt  the rendered conversation: some templates end with the opening tag, so that the answer begins inside

    Line ends next to the tags belong to neither. Tags further on are content. Format: chat templates and model cards of
    Qwen/Qwen3-8B, Qwen/QwQ-32B and deepseek-ai/DeepSeek-R1.
    """

    markers: ClassVar[tuple[str, ...]] = (OPEN, CLOSE)

    def __init__(self, prompt: str = "") -> None:
        self._opened = prompt.rstrip().endswith(OPEN)
        self._text = TextBuffer()
        self._deltas: list[MessageDelta] = []
        self._said = self._thought = False  # anything yet
        self._ends = ""  # line ends at the end of what was thought so far
        self._state = self._at_start

    def feed(self, text: str) -> list[MessageDelta]:
        self._text.feed(text)
        while self._state():
            pass
        return self._take()

    def finish(self) -> list[MessageDelta]:
        rest = self._text.take(len(self._text.rest))
        if self._state == self._thinking or (self._state == self._at_start and self._opened):
            self._think(rest)
        elif rest:
            self._deltas.append(ContentDelta(rest))
        return self._take()

    def _at_start(self) -> bool:
        rest = self._text.rest.lstrip()
        if not rest or partial_marker_length(rest, OPEN) == len(rest):
            return False
        if rest.startswith(OPEN):
            self._text.take(len(self._text.rest) - len(rest) + len(OPEN))
            self._opened = True
        self._state = self._thinking if self._opened else self._answering
        self._said = not self._opened
        return True

    def _thinking(self) -> bool:
        text, marker = self._text.take_until(CLOSE)
        self._think(text)
        if marker:
            self._state = self._answering
        return bool(marker)

    def _think(self, text: str) -> None:
        """Without line ends at the beginning, and those at the end only if more comes."""
        text = self._ends + text if self._thought else text.lstrip("\n")
        thought = text.rstrip("\n")
        self._ends = text[len(thought) :]
        if thought:
            self._thought = True
            self._deltas.append(ReasoningDelta(thought))

    def _answering(self) -> bool:
        text = self._text.take(len(self._text.rest))
        text = text if self._said else text.lstrip("\n")
        if text:
            self._said = True
            self._deltas.append(ContentDelta(text))
        return False

    def _take(self) -> list[MessageDelta]:
        taken, self._deltas = merge_deltas(self._deltas), []
        return taken


def _harmony(prompt: str) -> Parser:
    return HarmonyParser(reasoning=True, tools=False)


REASONING_PARSERS: Mapping[str, Callable[[str], Parser]] = {
    "think": ThinkParser,
    "qwen3": ThinkParser,
    "deepseek-r1": ThinkParser,
    "gpt-oss": _harmony,
}


def reasoning_parser(name: str, prompt: str = "") -> Parser:
    """A parser for the answer to this prompt. Raises ValueError for a name that does not exist."""
    if name not in REASONING_PARSERS:
        raise ValueError(f"no reasoning parser {name!r}; there are {', '.join(REASONING_PARSERS)}")
    return REASONING_PARSERS[name](prompt)


def detect_reasoning_parser(chat_template: str, model_type: str | None = None) -> str | None:
    """The name of the parser for what this template's model thinks; None if it shows no known way."""
    if model_type == "gpt_oss" or (START in chat_template and CHANNEL in chat_template):
        return "gpt-oss"
    return "think" if CLOSE in chat_template else None
