"""Tool calls as bare JSON, as in Llama 3.1 and later.

    {"name": "weather", "parameters": {"city": "Paris"}}

optionally after <|python_tag|>; several are separated by ";" or a newline. Other JSON is content.
Format: the prompt format pages of github.com/meta-llama/llama-models
(models/llama3_1/prompt_format.md, "JSON based tool calling") and the chat template of
meta-llama/Llama-3.1-8B-Instruct.
"""

from typing import ClassVar

from atomc.runtime.server.parsers.tool_parsers.json_call import SPACE, JsonCallParser
from atomc.runtime.server.parsers.tool_parsers.state_machine import JsonCallStateMachine

TAG = "<|python_tag|>"


class LlamaToolParser(JsonCallStateMachine):
    markers: ClassVar[tuple[str, ...]] = (TAG,)

    def __init__(self) -> None:
        super().__init__()
        self._state = self._end_call

    def _finish_content(self, rest: str) -> None:
        self._deltas.content(rest)

    def _end_call(self) -> bool:
        """After a call, and also at the start and after the tag."""
        between = self._deltas.num_calls and not self._raw
        skipped = self._text.take_characters(f"[{SPACE};]*" if between else f"[{SPACE}]*")
        if skipped and not between:
            self._raw.append(skipped)
        if self._text.is_prefix_of(TAG):  # also if nothing is left
            return False
        if self._text.startswith(TAG):
            self._raw.append(self._text.take(len(TAG)))
        elif self._text.startswith("{"):
            self._call, self._state = JsonCallParser(strict=True), self._read_call
        else:
            self._content(self._read_content)
        return True

    def _read_content(self) -> bool:
        text, marker = self._text.take_until(TAG)
        self._deltas.content(text)
        if marker:
            self._enter(self._end_call, marker)
        return bool(marker)
