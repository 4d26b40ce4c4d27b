"""Answers of Anthropic's Messages API, with every field that its schema requires.

Fields about what this server does not have are null: billing, citations, containers, tools that run
on the server, refusals with a category.
"""

from typing import Annotated, Literal

from pydantic import Field
from typing_extensions import TypedDict  # pydantic reads no other before Python 3.12

from atomc.runtime.server.service.protocol import JSONObject
from atomc.runtime.server.service.response_types import ChatUsage


class TextContent(TypedDict):
    type: Literal["text"]
    text: str
    citations: None


class ThinkingContent(TypedDict):
    type: Literal["thinking"]
    thinking: str
    signature: str


class Caller(TypedDict):
    """direct: the model itself, not code that it wrote."""

    type: Literal["direct"]


class ToolUseContent(TypedDict):
    type: Literal["tool_use"]
    id: str
    name: str
    input: JSONObject
    caller: Caller


Content = Annotated[TextContent | ThinkingContent | ToolUseContent, Field(discriminator="type")]


class OutputTokensDetails(TypedDict):
    thinking_tokens: int


class DeltaUsage(TypedDict):
    """Of the event message_delta. input_tokens leaves out those from the prefix cache."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    server_tool_use: None


class MessageUsage(DeltaUsage):
    cache_creation: None
    inference_geo: None
    service_tier: None


class StopFields(TypedDict):
    """What a message and the event message_delta say about the end."""

    stop_reason: str | None
    stop_sequence: str | None
    stop_details: None
    container: None


class AnthropicMessage(StopFields):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[Content]
    usage: MessageUsage


class InputTokens(TypedDict):
    input_tokens: int


def stop(reason: str | None, sequence: str | None = None) -> StopFields:
    return {
        "stop_reason": reason,
        "stop_sequence": sequence,
        "stop_details": None,
        "container": None,
    }


def delta_usage(usage: ChatUsage) -> DeltaUsage:
    num_cached = usage["prompt_tokens_details"]["cached_tokens"]
    num_thinking = usage["completion_tokens_details"]["reasoning_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"] - num_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": num_cached,
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"thinking_tokens": num_thinking},
        "server_tool_use": None,
    }


def message_usage(usage: ChatUsage) -> MessageUsage:
    return {
        **delta_usage(usage),
        "cache_creation": None,
        "inference_geo": None,
        "service_tier": None,
    }
