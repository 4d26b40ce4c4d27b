"""Tool calls between tags, as in Hermes 2 Pro, Qwen2.5 and Qwen3.

    <tool_call>
    {"name": "weather", "arguments": {"city": "Paris"}}
    </tool_call>

Format: model cards of NousResearch/Hermes-2-Pro-Llama-3-8B (with
github.com/NousResearch/Hermes-Function-Calling) and the chat template of Qwen/Qwen3-8B. Several
calls are several pairs of tags.
"""

from typing import ClassVar

from atomc.runtime.server.parsers.tool_parsers.json_call import JsonCallParser
from atomc.runtime.server.parsers.tool_parsers.state_machine import JsonCallStateMachine

BEGIN, END = "<tool_call>", "</tool_call>"


class HermesToolParser(JsonCallStateMachine):
    markers: ClassVar[tuple[str, ...]] = (BEGIN, END)

    def _read_content(self) -> bool:
        text, marker = self._text.take_until(BEGIN)
        self._deltas.content(text)
        if marker:
            self._begin(marker)
        return bool(marker)

    def _begin(self, marker: str) -> None:
        self._call = JsonCallParser()
        self._enter(self._read_call, marker)

    def _end_call(self) -> bool:
        """Up to the closing tag, or to the next opening tag if it is missing."""
        _, marker = self._text.take_until(END, BEGIN)
        if marker == BEGIN:
            self._begin(marker)
        elif marker == END:
            self._state = self._read_content
        return bool(marker)
