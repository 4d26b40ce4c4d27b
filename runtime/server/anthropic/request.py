"""Request bodies of Anthropic's Messages API.

Fields about billing, Anthropic's prompt cache or its own tools are accepted and ignored.
"""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, JsonValue, SkipValidation

from atomc.files.json_types import JSON, json_kind
from atomc.runtime.server.http.limits import CONTENT_BLOCKS, MESSAGES
from atomc.runtime.server.service.protocol import (
    FailFastList,
    Int64,
    JSONObject,
    RequestModel,
    SamplingFields,
)

Ignored = SkipValidation[JsonValue]


def _check_num_blocks(messages: JSON) -> JSON:
    """Raises ValueError for too many messages or blocks: validation would block the event loop."""
    if not isinstance(messages, list):
        return messages
    if len(messages) > MESSAGES:
        raise ValueError(f"it has {len(messages)} messages, at most {MESSAGES} are allowed")
    num_blocks = sum(map(_num_blocks, messages))
    if num_blocks > CONTENT_BLOCKS:
        raise ValueError(_too_many_blocks(num_blocks))
    return messages


def _num_blocks(value: JSON) -> int:
    """Those in the content of a message, or of a block."""
    content = value.get("content") if isinstance(value, dict) else None
    return len(content) + sum(map(_num_blocks, content)) if isinstance(content, list) else 0


def _too_many_blocks(number: int) -> str:
    return f"it has {number} content blocks, at most {CONTENT_BLOCKS} are allowed"


def _content_blocks(content: JSON) -> JSON:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if isinstance(content, list):
        if len(content) > CONTENT_BLOCKS:
            raise ValueError(_too_many_blocks(len(content)))
        return content
    raise ValueError(f"it is {json_kind(content)}, expected a string or a list of content blocks")


class ContentBlock(RequestModel):
    cache_control: Ignored = None


class TextBlock(ContentBlock):
    type: Literal["text"]
    text: str
    citations: Ignored = None


class Base64Source(RequestModel):
    type: Literal["base64"]
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"]
    data: str


class UrlSource(RequestModel):
    type: Literal["url"]
    url: str


class ImageBlock(ContentBlock):
    type: Literal["image"]
    source: Annotated[Base64Source | UrlSource, Field(discriminator="type")]


class ThinkingBlock(ContentBlock):
    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(ContentBlock):
    """Reasoning that only Anthropic can read."""

    type: Literal["redacted_thinking"]
    data: str


class ToolUseBlock(ContentBlock):
    type: Literal["tool_use"]
    id: str
    name: str
    input: JSONObject
    caller: Ignored = None
    toolset_name: Ignored = None


TextBlocks = Annotated[
    FailFastList[TextBlock],
    BeforeValidator(_content_blocks, json_schema_input_type=str | list[TextBlock]),
]
Part = Annotated[TextBlock | ImageBlock, Field(discriminator="type")]
Parts = Annotated[
    FailFastList[Part], BeforeValidator(_content_blocks, json_schema_input_type=str | list[Part])
]


class ToolResultBlock(ContentBlock):
    type: Literal["tool_result"]
    tool_use_id: str
    content: Parts = Field(default=[])
    is_error: bool = False  # chat templates have no place for it
    toolset_name: Ignored = None


UserBlock = Annotated[TextBlock | ImageBlock | ToolResultBlock, Field(discriminator="type")]
AssistantBlock = Annotated[
    TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock, Field(discriminator="type")
]


class UserMessage(RequestModel):
    role: Literal["user"]
    content: Annotated[
        FailFastList[UserBlock],
        BeforeValidator(_content_blocks, json_schema_input_type=str | list[UserBlock]),
    ]


class AssistantMessage(RequestModel):
    role: Literal["assistant"]
    content: Annotated[
        FailFastList[AssistantBlock],
        BeforeValidator(_content_blocks, json_schema_input_type=str | list[AssistantBlock]),
    ]


class SystemMessage(RequestModel):
    role: Literal["system"]
    content: TextBlocks


AnyMessage = Annotated[UserMessage | AssistantMessage | SystemMessage, Field(discriminator="role")]


class CustomTool(RequestModel):
    """A tool of the client. Those that Anthropic defines have no schema, and are left out."""

    type: Literal["custom"] | None = None
    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    input_schema: JSONObject
    strict: bool | None = None
    cache_control: Ignored = None
    allowed_callers: Ignored = None
    defer_loading: Ignored = None
    eager_input_streaming: Ignored = None
    input_examples: Ignored = None


class ToolChoice(RequestModel):
    type: Literal["auto", "any", "none"]
    disable_parallel_tool_use: bool = False


class NamedToolChoice(RequestModel):
    type: Literal["tool"]
    name: str
    disable_parallel_tool_use: bool = False


class Thinking(RequestModel):
    """display: "omitted" leaves the text of the thinking blocks empty."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Annotated[int, Field(ge=0)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class JsonOutput(RequestModel):
    type: Literal["json_schema"]
    schema_: JSONObject = Field(alias="schema")


class OutputConfig(RequestModel):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonOutput | None = None


class PromptRequest(RequestModel):
    """The fields that the prompt depends on: the body of /v1/messages/count_tokens."""

    model: str | None = None
    messages: Annotated[FailFastList[AnyMessage], BeforeValidator(_check_num_blocks)]
    system: TextBlocks | None = None
    tools: FailFastList[CustomTool] | None = None
    tool_choice: Annotated[ToolChoice | NamedToolChoice, Field(discriminator="type")] | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    # the server's own
    chat_template_kwargs: JSONObject | None = None
    # accepted and ignored
    cache_control: Ignored = None
    context_management: Ignored = None
    speed: Ignored = None

    tool_types = ("custom",)


class MessagesRequest(SamplingFields, PromptRequest):
    max_tokens: Int64
    stop_sequences: FailFastList[str] | None = None
    # accepted and ignored
    metadata: Ignored = None
    diagnostics: Ignored = None
    inference_geo: Ignored = None
    service_tier: Ignored = None
