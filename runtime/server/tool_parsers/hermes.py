"""Tool calls between tags, as in Hermes 2 Pro, Qwen2.5 and Qwen3.

    <tool_call>
    {"name": "weather", "arguments": {"city": "Paris"}}
    </tool_call>

Format: model cards of NousResearch/Hermes-2-Pro-Llama-3-8B (with github.com/NousResearch/Hermes-Function-Calling) and
the chat template of Qwen/Qwen3-8B. Several calls are several pairs of tags.
"""

from collections.abc import Callable
from typing import ClassVar

from atomc.runtime.server.message_deltas import DeltaBuilder, MessageDelta, call_id
from atomc.runtime.server.text_buffer import TextBuffer
from atomc.runtime.server.tool_parsers.json_call import JsonCallParser

BEGIN, END = "<tool_call>", "</tool_call>"


class HermesToolParser:
    markers: ClassVar[tuple[str, ...]] = (BEGIN, END)

    def __init__(self, new_id: Callable[[], str] = call_id) -> None:
        self._text = TextBuffer()
        self._deltas = DeltaBuilder(new_id)
        self._call = JsonCallParser()
        self._raw = ""  # becomes content if this is not a call
        self._state = self._in_content

    def feed(self, text: str) -> list[MessageDelta]:
        self._text.feed(text)
        while self._state():
            pass
        return self._deltas.take()

    def finish(self) -> list[MessageDelta]:
        if self._state != self._after_call:
            self._deltas.content(self._raw + self._text.rest)
        self._deltas.finish()
        return self._deltas.take()

    def _in_content(self) -> bool:
        text, marker = self._text.take_until(BEGIN)
        self._deltas.content(text)
        if marker:
            self._call, self._raw, self._state = JsonCallParser(), marker, self._in_call
        return bool(marker)

    def _in_call(self) -> bool:
        call = self._call
        was_started = call.started
        read = self._text.take(call.feed(self._text.rest))
        if not call.started:
            self._raw += read
            if call.invalid:
                self._deltas.content(self._raw)
                self._raw, self._state = "", self._in_content
            return call.invalid
        if not was_started:
            self._deltas.call(call.name)
            self._raw = ""
        self._deltas.arguments(call.take())
        if call.done or call.invalid:
            self._state = self._after_call
        return call.done or call.invalid

    def _after_call(self) -> bool:
        """Up to the closing tag, or to the next opening tag if it is missing."""
        _, marker = self._text.take_until(END, BEGIN)
        if marker == BEGIN:
            self._call, self._raw, self._state = JsonCallParser(), marker, self._in_call
        elif marker == END:
            self._state = self._in_content
        return bool(marker)
