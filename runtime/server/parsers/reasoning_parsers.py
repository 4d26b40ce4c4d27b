"""Streaming parsers that split the model's text into ReasoningDelta and ContentDelta."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

from atomc.runtime.constrained.reasoning_budget import CLOSE, OPEN
from atomc.runtime.server.parsers.message_deltas import (
    ContentDelta,
    MessageDelta,
    Parser,
    ReasoningDelta,
    merge_deltas,
)
from atomc.runtime.server.parsers.text_buffer import TextBuffer
from atomc.runtime.server.parsers.tool_parsers.harmony import CHANNEL, HARMONY, START, HarmonyParser


class ThinkParser:
    """<think>...</think> at the start of the text, as in Qwen3, DeepSeek-R1 and QwQ.

    opened        the prompt ends within the reasoning
    may_be_open   it may: text without an opening tag is reasoning if a closing tag follows, and is
                  held back until then

    Newlines next to the tags are dropped. Later tags are content. Format: chat templates and model
    cards of Qwen/Qwen3-8B, Qwen/QwQ-32B and deepseek-ai/DeepSeek-R1.
    """

    markers: ClassVar[tuple[str, ...]] = (OPEN, CLOSE)

    def __init__(self, opened: bool = False, may_be_open: bool = False) -> None:
        self.opened, self._may_be_open = opened, may_be_open
        self._text = TextBuffer()
        self._deltas: list[MessageDelta] = []
        self._has_content = self._has_reasoning = False
        self._held: list[str] = []  # text of unknown kind
        # Trailing newlines of the reasoning, emitted only if more reasoning follows.
        self._newlines: list[str] = []
        self._state = self._read_start

    def feed(self, text: str) -> list[MessageDelta]:
        self._text.feed(text)
        while self._state():
            pass
        return self._take()

    def finish(self) -> list[MessageDelta]:
        rest = self._take_held() + self._text.take_all()
        if self._state == self._read_reasoning or (self._state == self._read_start and self.opened):
            self._add_reasoning(rest)
        elif rest:
            self._deltas.append(ContentDelta(rest))
        return self._take()

    def _read_start(self) -> bool:
        self._held.append(self._text.take_characters(r"\s*"))
        if self._text.is_prefix_of(OPEN):  # also if nothing is left
            return False
        if self._text.startswith(OPEN):
            self._text.take(len(OPEN))
            self.opened = True
            self._held.clear()
        if self._may_be_open and not self.opened:
            self._state = self._read_undecided
            return True
        space = self._take_held()
        if self.opened:
            self._state = self._read_reasoning
            self._add_reasoning(space)
        else:
            self._state, self._has_content = self._read_content, True
            if space:
                self._deltas.append(ContentDelta(space))
        return True

    def _read_undecided(self) -> bool:
        text, marker = self._text.take_until(CLOSE)
        self._held.append(text)
        if marker:
            self._add_reasoning(self._take_held())
            self._state = self._read_content
        return bool(marker)

    def _read_reasoning(self) -> bool:
        text, marker = self._text.take_until(CLOSE)
        self._add_reasoning(text)
        if marker:
            self._state = self._read_content
        return bool(marker)

    def _add_reasoning(self, text: str) -> None:
        """Emits reasoning without leading newlines; holds trailing ones back."""
        text = text if self._has_reasoning else text.lstrip("\n")
        stripped = text.rstrip("\n")
        if stripped:
            self._has_reasoning = True
            self._deltas.append(ReasoningDelta("".join((*self._newlines, stripped))))
            self._newlines.clear()
        self._newlines.append(text[len(stripped) :])

    def _read_content(self) -> bool:
        text = self._text.take_all()
        text = text if self._has_content else text.lstrip("\n")
        if text:
            self._has_content = True
            self._deltas.append(ContentDelta(text))
        return False

    def _take_held(self) -> str:
        text = "".join(self._held)
        self._held.clear()
        return text

    def _take(self) -> list[MessageDelta]:
        taken, self._deltas = merge_deltas(self._deltas), []
        return taken


@dataclass(frozen=True)
class PromptEnd:
    """Where the text of a response begins.

    prompt      the rendered chat; some templates open or close the reasoning at its end
    prefill     the beginning of the response that the client wrote
    last_text   of the last message, after which the turn of the response begins
    thinking    the client has switched the reasoning of the chat template on
    """

    prompt: str = ""
    prefill: str | None = None
    last_text: str = ""
    thinking: bool = False

    @property
    def is_open(self) -> bool:
        """Whether the response begins within the reasoning."""
        turn = self._turn
        return turn.rfind(OPEN) > turn.rfind(CLOSE)

    @property
    def is_closed(self) -> bool:
        """Whether the response begins after the reasoning."""
        return self.prefill is not None or CLOSE in self._turn

    @property
    def _turn(self) -> str:
        """What the prompt has of the response. Without the text of the last message in the prompt,
        the tag at its end: tags before may be those of a message.
        """
        if self.prefill is not None:
            return self.prefill
        end = self.prompt.rstrip()
        for tag in (OPEN, CLOSE):  # of which the text of the message may be a part
            if end.endswith(tag):
                return tag
        text = self.last_text.strip()
        return end.rpartition(text)[2] if text and text in end else ""


def _think(end: PromptEnd | None) -> Parser:
    if end is None:
        return ThinkParser()
    return ThinkParser(end.is_open, end.thinking and not end.is_closed)


def _deepseek_r1(end: PromptEnd | None) -> Parser:
    """The model may leave out the opening tag: a text is reasoning up to the closing one."""
    return ThinkParser(end is not None and (end.is_open or not end.is_closed))


REASONING_PARSERS: Mapping[str, Callable[[PromptEnd | None], Parser]] = {
    "think": _think,
    "qwen3": _think,
    "deepseek-r1": _deepseek_r1,
    HARMONY: lambda _: HarmonyParser(reasoning=True, tools=False),
}


def reasoning_parser(name: str, end: PromptEnd | None = None) -> Parser:
    """A parser for one response. end: None for one that does not begin within the reasoning. Raises
    ValueError for an unknown name.
    """
    if name not in REASONING_PARSERS:
        raise ValueError(
            f"unknown reasoning parser {name!r}, expected one of {', '.join(REASONING_PARSERS)}"
        )
    return REASONING_PARSERS[name](end)


def detect_reasoning_parser(chat_template: str, model_type: str | None = None) -> str | None:
    """The name of the parser for the reasoning of this chat template; None if it is unknown."""
    if model_type == "gpt_oss" or (START in chat_template and CHANNEL in chat_template):
        return HARMONY
    return "think" if OPEN in chat_template or CLOSE in chat_template else None
