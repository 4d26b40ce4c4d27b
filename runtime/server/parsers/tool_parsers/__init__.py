"""Streaming parsers that split the model's text into ContentDelta, ToolCallStart and
ToolCallArguments.
"""

from collections.abc import Mapping

from atomc.files.json_types import JSONObject
from atomc.runtime.server.parsers.message_deltas import Parser
from atomc.runtime.server.parsers.tool_parsers.format_parser import FormatParser
from atomc.runtime.server.parsers.tool_parsers.formats import ALIASES, FORMATS
from atomc.runtime.server.parsers.tool_parsers.harmony import CHANNEL, HARMONY, START, HarmonyParser

TOOL_PARSERS = (*FORMATS, HARMONY, *ALIASES)


def tool_parser(name: str, schemas: Mapping[str, JSONObject] | None = None) -> Parser:
    """A parser for one choice. schemas: of the arguments, by function. Raises ValueError for
    another name.
    """
    name = ALIASES.get(name, name)
    if name == HARMONY:
        return HarmonyParser()
    if name not in FORMATS:
        raise ValueError(f"unknown tool parser {name!r}, expected one of {', '.join(TOOL_PARSERS)}")
    return FormatParser(FORMATS[name], schemas)


def detect_tool_parser(chat_template: str, model_type: str | None = None) -> str | None:
    """The name of the format of the tool calls of this chat template; None if it is unknown."""
    if model_type == "gpt_oss" or (START in chat_template and CHANNEL in chat_template):
        return HARMONY
    return next((name for name, form in FORMATS.items() if form.is_seen_in(chat_template)), None)
