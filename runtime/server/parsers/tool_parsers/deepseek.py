"""Tool calls between special tokens, as in DeepSeek-V3, R1 and V3.1. V3.1, here with ASCII bars:

    <|tool_calls_begin|><|tool_call_begin|>weather<|tool_sep|>{"city":
    "Paris"}<|tool_call_end|><|tool_calls_end|>

V3 and R1 write "function", the separator, the name, a newline, and the arguments as a Markdown code
block of json. Format: chat templates and model cards (section "Toolcall") of
deepseek-ai/DeepSeek-V3-0324, DeepSeek-R1-0528 and DeepSeek-V3.1.
"""

from typing import ClassVar

from atomc.runtime.server.parsers.tool_parsers.json_call import SPACE
from atomc.runtime.server.parsers.tool_parsers.state_machine import ArgumentsStateMachine


def token(name: str) -> str:
    """The special token of this name: with full-width bars, and U+2581 between words."""
    return f"<\uff5c{name.replace('_', chr(0x2581))}\uff5c>"


CALLS, CALLS_END = token("tool_calls_begin"), token("tool_calls_end")
CALL, CALL_END = token("tool_call_begin"), token("tool_call_end")
SEPARATOR = token("tool_sep")
BLOCK = "```json"


class DeepSeekToolParser(ArgumentsStateMachine):
    markers: ClassVar[tuple[str, ...]] = (CALLS, CALL, SEPARATOR, CALL_END, CALLS_END)

    def __init__(self) -> None:
        super().__init__()
        self._kind = ""
        self._head: list[str] = []  # the text between separator and arguments

    def _read_content(self) -> bool:
        text, marker = self._text.take_until(CALLS, CALL, CALLS_END)
        self._deltas.content(text)
        if marker == CALL:
            self._enter(self._read_kind, marker)
        return bool(marker)

    def _read_kind(self) -> bool:
        """Before the separator: "function" (V3, R1) or the name (V3.1)."""
        text, marker = self._text.take_until(SEPARATOR, CALL, CALL_END)
        self._raw.append(text)
        if marker == SEPARATOR:
            self._kind = "".join(self._raw).removeprefix(CALL).strip()
            self._raw.append(marker)
            self._head, self._state = [], self._read_name
        elif marker:
            self._emit_content(marker)
        return bool(marker)

    def _read_name(self) -> bool:
        """After the separator: the arguments (V3.1), or the name and the arguments (V3, R1)."""
        self._head.append(self._text.take_characters("[^{<]*"))
        self._raw.append(self._head[-1])
        if not self._text:
            return False
        name = self._name("".join(self._head)) if self._text.startswith("{") else None
        if name is None:
            self._emit_content("")
            return True
        self._start_call(name)
        return True

    def _name(self, head: str) -> str | None:
        """The function name. head: the text between separator and arguments, without "<". None if
        it matches neither format.
        """
        if not head.strip(SPACE):
            return self._kind or None
        name, _, block = head.partition("\n")
        is_v3 = self._kind == "function" and block.strip(SPACE) == BLOCK
        return name.strip() or None if is_v3 else None

    def _end_call(self) -> bool:
        """Up to the end of the call, or to the next call if the end is missing."""
        _, marker = self._text.take_until(CALL_END, CALLS_END, CALL)
        if marker == CALL:
            self._enter(self._read_kind, marker)
        elif marker:
            self._state = self._read_content
        return bool(marker)

    def _emit_content(self, marker: str) -> None:
        if marker == CALL:
            self._content(self._read_kind)
            self._raw.append(marker)
        else:
            self._content(self._read_content, marker)
