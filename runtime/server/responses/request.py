"""The body of POST /v1/responses, and the chat request that it stands for."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, JsonValue

from atomc.files.json_types import JSONObject as Item
from atomc.runtime.server.http.responses import invalid
from atomc.runtime.server.responses.items import chat_messages
from atomc.runtime.server.service import protocol
from atomc.runtime.server.service.protocol import FailFastList, Int64, JSONObject, RequestModel

LOGPROBS = "message.output_text.logprobs"
# Fields that a chat request has, too, besides those of protocol.SamplingRequest.
CHAT_FIELDS = ("logprobs", "top_logprobs", "parallel_tool_calls", "chat_template_kwargs")


def _check_tool_choice(value: JsonValue) -> JsonValue:
    kind = value.get("type") if isinstance(value, dict) else None
    if isinstance(kind, str) and kind not in ("function", "allowed_tools"):
        raise ValueError(
            f"it has the type {kind!r:.40}, expected 'function' or 'allowed_tools': this server "
            "runs no other tools"
        )
    return value


class FunctionTool(protocol.Function):
    type: Literal["function"]


class FunctionChoice(RequestModel):
    type: Literal["function"]
    name: str


class AllowedFunctions(RequestModel):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: FailFastList[FunctionChoice]

    tool_types = ("function",)


class TextFormat(RequestModel):
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    schema_: JSONObject | None = Field(None, alias="schema")
    strict: bool | None = None


class TextConfig(RequestModel):
    format: TextFormat | None = None
    verbosity: str | None = None  # accepted and ignored


class Reasoning(RequestModel):
    effort: str | None = None
    # Accepted and ignored: responses have the reasoning itself.
    summary: str | None = None
    generate_summary: str | None = None


class ResponseStreamOptions(RequestModel):
    include_obfuscation: bool | None = None  # OpenAI's padding against traffic analysis: ignored


class ResponsesRequest(protocol.SamplingRequest):
    input: Annotated[
        str | FailFastList[JSONObject], protocol.expected("a string or a list of items")
    ]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    max_output_tokens: Annotated[Int64, Field(ge=1)] | None = None
    tools: FailFastList[FunctionTool] | None = None
    tool_choice: Annotated[
        Literal["none", "auto", "required"] | FunctionChoice | AllowedFunctions | None,
        BeforeValidator(_check_tool_choice),
    ] = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    top_logprobs: Int64 | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: (
        Annotated[
            dict[
                Annotated[str, Field(max_length=64)],
                Annotated[str, Field(max_length=512)],
            ],
            Field(max_length=16),
        ]
        | None
    ) = None
    include: (
        FailFastList[
            Literal[
                "message.output_text.logprobs",
                # Accepted and ignored: input items always have their images, reasoning items their
                # text, and the other outputs are those of OpenAI's tools.
                "message.input_image.image_url",
                "reasoning.encrypted_content",
                "file_search_call.results",
                "web_search_call.results",
                "web_search_call.action.sources",
                "computer_call_output.output.image_url",
                "code_interpreter_call.outputs",
            ]
        ]
        | None
    ) = None
    # extensions of OpenAI's API
    chat_template_kwargs: JSONObject | None = None
    # refused
    background: bool | None = None
    conversation: JsonValue = None
    prompt: JsonValue = None
    # accepted and ignored
    stream_options: ResponseStreamOptions | None = None
    max_tool_calls: Int64 | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None

    tool_types = ("function",)

    @property
    def logprobs(self) -> bool:
        return LOGPROBS in (self.include or ())


def check_supported(body: ResponsesRequest) -> None:
    """Raises a 400 for a field that this server does not implement."""
    for name, value, remedy in (
        ("background", body.background, "responses are generated while the client waits"),
        ("conversation", body.conversation, "continue with previous_response_id"),
        ("prompt", body.prompt, "send the text as instructions and input"),
    ):
        if value:
            raise invalid(f"{name} is not supported: {remedy}", name)
    if body.truncation == "auto":
        raise invalid(
            "truncation 'auto' is not supported, only 'disabled': drop old items of the input",
            "truncation",
        )
    if body.top_logprobs is not None and not body.logprobs:
        raise invalid(f"top_logprobs needs include=[{LOGPROBS!r}]", "top_logprobs")


def chat_request(body: ResponsesRequest, items: Sequence[Item]) -> protocol.ChatRequest:
    """The chat that answers these items."""
    names = (*protocol.SamplingRequest.model_fields, *CHAT_FIELDS)
    shared: dict[str, Any] = {name: getattr(body, name) for name in names}
    tools = [
        protocol.Tool(
            type="function", function=protocol.Function(**tool.model_dump(exclude={"type"}))
        )
        for tool in body.tools or ()
    ]
    return protocol.ChatRequest(
        **shared,
        messages=chat_messages(body.instructions, items),
        max_completion_tokens=body.max_output_tokens,
        response_format=_response_format(body),
        tools=tools or None,
        tool_choice=_tool_choice(body),
        reasoning_effort=body.reasoning.effort if body.reasoning is not None else None,
    )


def _tool_choice(body: ResponsesRequest) -> protocol.ToolChoice | None:
    match body.tool_choice:
        case FunctionChoice(name=name):
            return protocol.NamedTool(function=protocol.NamedFunction(name=name))
        case AllowedFunctions(mode=mode, tools=functions):
            tools = [
                protocol.NamedTool(function=protocol.NamedFunction(name=tool.name))
                for tool in functions
            ]
            return protocol.AllowedTools(allowed_tools=protocol.ToolSubset(mode=mode, tools=tools))
        case choice:
            return choice


def _response_format(body: ResponsesRequest) -> protocol.ResponseFormat | None:
    text = body.text.format if body.text is not None else None
    if text is None or text.type == "text":
        return None
    if text.type == "json_object":
        return protocol.ResponseFormat(type="json_object")
    if text.name is None or text.schema_ is None:
        raise invalid("text.format 'json_schema' needs the fields name and schema", "text")
    schema = protocol.JsonSchema(
        name=text.name, description=text.description, schema=text.schema_, strict=text.strict
    )
    return protocol.ResponseFormat(type="json_schema", json_schema=schema)
