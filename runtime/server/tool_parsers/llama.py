"""Tool calls as bare JSON, as in Llama 3.1 and later.

    {"name": "weather", "parameters": {"city": "Paris"}}

optionally after <|python_tag|>; several are separated by ";" or a newline. Other JSON is content.
Format: the prompt format pages of github.com/meta-llama/llama-models (models/llama3_1/prompt_format.md, "JSON based tool
calling") and the chat template of meta-llama/Llama-3.1-8B-Instruct.
"""

from collections.abc import Callable
from typing import ClassVar

from atomc.runtime.server.message_deltas import DeltaBuilder, MessageDelta, call_id
from atomc.runtime.server.text_buffer import TextBuffer
from atomc.runtime.server.tool_parsers.json_call import SPACE, JsonCallParser

TAG = "<|python_tag|>"


class LlamaToolParser:
    markers: ClassVar[tuple[str, ...]] = (TAG,)

    def __init__(self, new_id: Callable[[], str] = call_id) -> None:
        self._text = TextBuffer()
        self._deltas = DeltaBuilder(new_id)
        self._call = JsonCallParser()
        self._raw = ""  # becomes content if this is not a call
        self._state = self._before_call

    def feed(self, text: str) -> list[MessageDelta]:
        self._text.feed(text)
        while self._text.rest and self._state():
            pass
        return self._deltas.take()

    def finish(self) -> list[MessageDelta]:
        self._deltas.content(self._raw + self._text.rest)
        self._deltas.finish()
        return self._deltas.take()

    def _before_call(self) -> bool:
        """At the start, after the tag, and between calls."""
        between = self._deltas.num_calls and not self._raw
        skipped = self._text.take(len(self._text.rest) - len(self._text.rest.lstrip(SPACE + ";" * between)))
        self._raw += "" if between else skipped
        rest = self._text.rest
        if not rest:
            return False
        if rest.startswith(TAG):
            self._raw += self._text.take(len(TAG))
        elif rest.startswith("{"):
            self._call, self._state = JsonCallParser(strict=True), self._in_call
        elif TAG.startswith(rest):
            return False
        else:
            self._emit_content()
        return True

    def _in_content(self) -> bool:
        text, marker = self._text.take_until(TAG)
        self._deltas.content(text)
        if marker:
            self._raw, self._state = marker, self._before_call
        return bool(marker)

    def _in_call(self) -> bool:
        call = self._call
        was_started = call.started
        read = self._text.take(call.feed(self._text.rest))
        if not call.started:
            self._raw += read
            if call.invalid:
                self._emit_content()
            return call.invalid
        if not was_started:
            self._deltas.call(call.name)
            self._raw = ""
        self._deltas.arguments(call.take())
        if call.done or call.invalid:
            self._state = self._before_call
        return call.done or call.invalid

    def _emit_content(self) -> None:
        self._deltas.content(self._raw)
        self._raw, self._state = "", self._in_content
