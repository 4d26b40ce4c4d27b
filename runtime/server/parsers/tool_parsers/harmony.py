"""The harmony format of GPT-OSS: messages on channels, including tool calls.

    <|channel|>analysis<|message|>...<|end|>
    <|start|>assistant<|channel|>commentary to=functions.weather
    <|constrain|>json<|message|>{"city": "Paris"}<|call|>
    <|start|>assistant<|channel|>final<|message|>...<|return|>

without the newlines. The prompt ends with "<|start|>assistant", so the text starts inside a header.
Format: cookbook.openai.com/articles/openai-harmony and the chat template of openai/gpt-oss-20b.
"""

import re
from typing import ClassVar

from atomc.runtime.server.parsers.tool_parsers.json_call import SPACE
from atomc.runtime.server.parsers.tool_parsers.state_machine import ArgumentsStateMachine

HARMONY = "gpt-oss"  # the name of the parsers
START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
ENDS = (END, CALL, RETURN, START)
# Starts of a header after the "<|start|>assistant" of the prompt.
HEADERS = (START, CHANNEL, "to=")
SPACES = f"[{SPACE}]*"
SEPARATOR = "\n\n"  # between messages of the same channel


class HarmonyParser(ArgumentsStateMachine):
    """Parses all channels.

    reasoning, tools   whether to parse these messages. If not, they stay in the content verbatim
                       for a second parser: the tool parser reads the content of the reasoning
                       parser
    """

    markers: ClassVar[tuple[str, ...]] = (START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL, RETURN)

    def __init__(self, *, reasoning: bool = False, tools: bool = True) -> None:
        super().__init__()
        self._reasoning, self._tools = reasoning, tools
        self._name = ""
        self._separators = {"content": "", "reasoning": ""}
        self._state = self._read_start

    def _finish_content(self, rest: str) -> None:
        if self._state == self._read_reasoning:
            self._deltas.reasoning(rest)
        else:
            super()._finish_content(rest)

    def _read_start(self) -> bool:
        self._raw.append(self._text.take_characters(SPACES))
        if self._text.is_prefix_of(*HEADERS):  # also if nothing is left
            return False
        if self._text.startswith(*HEADERS):
            self._state = self._read_header
        else:
            self._content(self._read_content)
        return True

    def _read_content(self) -> bool:
        """Text outside of messages is content."""
        text, marker = self._text.take_until(START)
        self._deltas.content(text)
        if marker:
            self._enter(self._read_header, marker)
        return bool(marker)

    def _read_header(self) -> bool:
        text, marker = self._text.take_until(MESSAGE, END, CALL, RETURN)
        self._raw.append(text)
        if marker == MESSAGE:
            self._start_message("".join(self._raw))
        elif marker:
            self._content(self._read_content, marker)
        return bool(marker)

    def _start_message(self, raw: str) -> None:
        """Choose the state for the message of this header, which may have its start."""
        header = raw.removeprefix(START)
        channel = re.search(re.escape(CHANNEL) + r"\s*(\w+)", header)
        function = re.search(r"(?:^|\s|assistant)to=functions\.([^\s<]+)", header)
        analysis = channel is not None and channel[1] == "analysis"
        if function and self._tools:
            self._name = function[1]
            self._enter(self._expect_arguments, raw + MESSAGE)
        elif function or (analysis and not self._reasoning):
            start = "" if raw.startswith(START) else f"{START}assistant"
            self._deltas.content(start + raw + MESSAGE)
            self._enter(self._verbatim)
        else:
            self._enter(self._read_reasoning if analysis else self._read_message)

    def _expect_arguments(self) -> bool:
        self._raw.append(self._text.take_characters(SPACES))
        if not self._text:
            return False
        if self._text.startswith("{"):
            self._start_call(self._name)
        else:
            self._content(self._verbatim)
        return True

    def _end_call(self) -> bool:
        return self._end_message(self._text.take_until(*ENDS)[1])

    def _read_reasoning(self) -> bool:
        text, marker = self._text.take_until(*ENDS)
        self._deltas.reasoning(self._separated("reasoning", text))
        return self._end_message(marker, "reasoning")

    def _read_message(self) -> bool:
        text, marker = self._text.take_until(*ENDS)
        self._deltas.content(self._separated("content", text))
        return self._end_message(marker, "content")

    def _verbatim(self) -> bool:
        text, marker = self._text.take_until(*ENDS)
        self._deltas.content(text + (marker if marker != START else ""))
        return self._end_message(marker)

    def _separated(self, channel: str, text: str) -> str:
        """The text, after a separator if an earlier message of this channel had text."""
        if not text:
            return ""
        separator, self._separators[channel] = self._separators[channel], ""
        return separator + text

    def _end_message(self, marker: str, channel: str = "") -> bool:
        if marker and channel:
            self._separators[channel] = SEPARATOR
        if marker == START:
            self._enter(self._read_header, marker)
        elif marker:
            self._enter(self._read_content)
        return bool(marker)
