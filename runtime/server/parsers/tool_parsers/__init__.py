"""Streaming parsers that split the model's text into ContentDelta, ToolCallStart and
ToolCallArguments.

A call starts when its name and the first character of its arguments are known. Text that turns out
not to be a call before that is content, unchanged. Arguments that become invalid later end there:
the client gets what the model wrote.
"""

from collections.abc import Callable, Mapping

from atomc.runtime.server.parsers.message_deltas import Parser
from atomc.runtime.server.parsers.tool_parsers import deepseek
from atomc.runtime.server.parsers.tool_parsers.deepseek import DeepSeekToolParser
from atomc.runtime.server.parsers.tool_parsers.harmony import CHANNEL, HARMONY, START, HarmonyParser
from atomc.runtime.server.parsers.tool_parsers.hermes import BEGIN, HermesToolParser
from atomc.runtime.server.parsers.tool_parsers.llama import TAG, LlamaToolParser

TOOL_PARSERS: Mapping[str, Callable[[], Parser]] = {
    "hermes": HermesToolParser,
    "qwen3": HermesToolParser,
    "llama3": LlamaToolParser,
    "deepseek": DeepSeekToolParser,
    HARMONY: HarmonyParser,
}
# Other formats with the tags of Hermes, which do not use JSON between them.
OTHER_BODIES = ("<function=", "<arg_key>")
LLAMA_HEADER = "<|start_header_id|>"


def tool_parser(name: str) -> Parser:
    """A parser for one choice. Raises ValueError for another name."""
    if name not in TOOL_PARSERS:
        raise ValueError(f"unknown tool parser {name!r}, expected one of {', '.join(TOOL_PARSERS)}")
    return TOOL_PARSERS[name]()


def detect_tool_parser(chat_template: str, model_type: str | None = None) -> str | None:
    """The name of the parser for the tool calls of this chat template; None if it is unknown."""
    if model_type == "gpt_oss" or (START in chat_template and CHANNEL in chat_template):
        return HARMONY
    if deepseek.CALL in chat_template:
        return "deepseek"
    if BEGIN in chat_template:
        return None if any(body in chat_template for body in OTHER_BODIES) else "hermes"
    is_llama = TAG in chat_template or (
        LLAMA_HEADER in chat_template and '"parameters"' in chat_template
    )
    return "llama3" if is_llama else None
