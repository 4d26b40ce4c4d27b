"""Parsers of tool calls: from the text of a model, as it streams, to Content, ToolStart and ToolArguments.

A call begins when its name and the first
character of its arguments are there; what breaks before that is content, as it came. Arguments that break later end
there: the client sees what the model wrote.
"""

from collections.abc import Callable, Mapping

from atomc.runtime.server.message_deltas import Parser, call_id
from atomc.runtime.server.tool_parsers import deepseek
from atomc.runtime.server.tool_parsers.deepseek import DeepSeekToolParser
from atomc.runtime.server.tool_parsers.harmony import CHANNEL, START, HarmonyParser
from atomc.runtime.server.tool_parsers.hermes import BEGIN, HermesToolParser
from atomc.runtime.server.tool_parsers.llama import TAG, LlamaToolParser

TOOL_PARSERS: Mapping[str, Callable[[Callable[[], str]], Parser]] = {
    "hermes": HermesToolParser,
    "qwen3": HermesToolParser,
    "llama3": LlamaToolParser,
    "deepseek": DeepSeekToolParser,
    "gpt-oss": HarmonyParser,
}
# How others write a call between Hermes' tags: not as JSON.
OTHER_BODIES = ("<function=", "<arg_key>")
LLAMA_HEADER = "<|start_header_id|>"


def tool_parser(name: str, new_id: Callable[[], str] = call_id) -> Parser:
    """A parser for one answer; `new_id` makes the ids of calls. Raises ValueError for a name that does not exist."""
    if name not in TOOL_PARSERS:
        raise ValueError(f"no tool parser {name!r}; there are {', '.join(TOOL_PARSERS)}")
    return TOOL_PARSERS[name](new_id)


def detect_tool_parser(chat_template: str, model_type: str | None = None) -> str | None:
    """The name of the parser for the calls that this template asks for; None if it asks for none that is known."""
    if model_type == "gpt_oss" or (START in chat_template and CHANNEL in chat_template):
        return "gpt-oss"
    if deepseek.CALL in chat_template:
        return "deepseek"
    if BEGIN in chat_template:
        return None if any(body in chat_template for body in OTHER_BODIES) else "hermes"
    as_llama = TAG in chat_template or (LLAMA_HEADER in chat_template and '"parameters"' in chat_template)
    return "llama3" if as_llama else None
