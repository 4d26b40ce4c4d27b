"""Calls between special tokens, as DeepSeek-V3, R1 and V3.1 write them. The tokens, here with ASCII bars:

    <|tool_calls_begin|><|tool_call_begin|>weather<|tool_sep|>{"city": "Paris"}<|tool_call_end|><|tool_calls_end|>

is V3.1; V3 and R1 write "function", the separator, the name, a line end, and the arguments as a Markdown block of json.
Format: chat templates and model cards (section "Toolcall") of deepseek-ai/DeepSeek-V3-0324, DeepSeek-R1-0528 and
DeepSeek-V3.1.
"""

from collections.abc import Callable
from typing import ClassVar

from atomc.runtime.server.message_deltas import DeltaBuilder, MessageDelta, call_id
from atomc.runtime.server.text_buffer import TextBuffer
from atomc.runtime.server.tool_parsers.json_call import SPACE, JsonScanner


def token(name: str) -> str:
    """The special token of that name: with a full-width bar, and U+2581 between the words."""
    return f"<\uff5c{name.replace('_', chr(0x2581))}\uff5c>"


CALLS, CALLS_END = token("tool_calls_begin"), token("tool_calls_end")
CALL, CALL_END = token("tool_call_begin"), token("tool_call_end")
SEPARATOR = token("tool_sep")
BLOCK = "```json"


class DeepSeekToolParser:
    markers: ClassVar[tuple[str, ...]] = (CALLS, CALL, SEPARATOR, CALL_END, CALLS_END)

    def __init__(self, new_id: Callable[[], str] = call_id) -> None:
        self._text = TextBuffer()
        self._deltas = DeltaBuilder(new_id)
        self._arguments = JsonScanner()
        self._raw = ""  # what becomes content if this is no call
        self._kind = ""
        self._state = self._in_content

    def feed(self, text: str) -> list[MessageDelta]:
        self._text.feed(text)
        while self._state():
            pass
        return self._deltas.take()

    def finish(self) -> list[MessageDelta]:
        if self._state != self._after_arguments:
            self._deltas.content(self._raw + self._text.rest)
        self._deltas.finish()
        return self._deltas.take()

    def _in_content(self) -> bool:
        text, marker = self._text.take_until(CALLS, CALL, CALLS_END)
        self._deltas.content(text)
        if marker == CALL:
            self._raw, self._state = marker, self._in_kind
        return bool(marker)

    def _in_kind(self) -> bool:
        """Before the separator: "function", or the name."""
        text, marker = self._text.take_until(SEPARATOR, CALL, CALL_END)
        self._raw += text
        if marker == SEPARATOR:
            self._kind = self._raw.removeprefix(CALL).strip()
            self._raw += marker
            self._state = self._in_name
        elif marker:
            self._no_call(marker)
        return bool(marker)

    def _in_name(self) -> bool:
        """After the separator: the arguments, or the name and then the arguments."""
        head, brace, _ = self._text.rest.partition("{")
        if not brace and "<" not in head:
            return False
        name = self._name(head) if brace else None
        if name is None:
            self._no_call("")
            return True
        self._text.take(len(head))
        self._raw = ""
        self._deltas.call(name)
        self._arguments, self._state = JsonScanner(), self._in_arguments
        return True

    def _name(self, head: str) -> str | None:
        """The function, given what is between the separator and the arguments; None if that is of neither form."""
        if not head.strip(SPACE):
            return self._kind or None
        name, _, block = head.partition("\n")
        of_v3 = self._kind == "function" and block.strip(SPACE) == BLOCK and "<" not in name
        return name.strip() or None if of_v3 else None

    def _in_arguments(self) -> bool:
        self._deltas.arguments(self._text.take(self._arguments.feed(self._text.rest)))
        ended = self._arguments.done or self._arguments.stopped
        if ended:
            self._state = self._after_arguments
        return ended

    def _after_arguments(self) -> bool:
        """To the end of the call, or to the next one where the end was forgotten."""
        _, marker = self._text.take_until(CALL_END, CALLS_END, CALL)
        if marker == CALL:
            self._raw, self._state = marker, self._in_kind
        elif marker:
            self._state = self._in_content
        return bool(marker)

    def _no_call(self, marker: str) -> None:
        if marker == CALL:
            self._deltas.content(self._raw)
            self._raw, self._state = marker, self._in_kind
            return
        self._deltas.content(self._raw + marker)
        self._raw, self._state = "", self._in_content
