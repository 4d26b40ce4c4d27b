"""Request bodies: OpenAI's fields and vLLM's extensions.

Fields about the client or about OpenAI's own service are accepted and ignored. What becomes of
unknown fields is in unknown_fields.py.
"""

from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal, Self, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    SkipValidation,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)

from atomc.files.json_types import json_kind
from atomc.runtime.server.http.limits import BIASED_TOKENS, TOOLS, check_fields

T = TypeVar("T")
# Report the first invalid item only.
FailFastList = Annotated[list[T], Field(fail_fast=True)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TokenIdKey = Annotated[TokenId, Field(strict=False)]  # the keys of a JSON object are strings
FiniteFloat = Annotated[float, Field(allow_inf_nan=False)]
Temperature = Annotated[FiniteFloat, Field(le=2)]
Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]
# Values of any JSON type: json.loads has made them, so they are not validated again.
JSONObject = dict[str, SkipValidation[JsonValue]]
Messages = FailFastList[JSONObject]
# How many items of a list a message describes.
FIRST_ITEMS = 16


def _check_logit_bias(value: JsonValue) -> JsonValue:
    if isinstance(value, dict) and len(value) > BIASED_TOKENS:
        raise ValueError(f"it has {len(value)} tokens, at most {BIASED_TOKENS} are allowed")
    return value


def expected(what: str) -> WrapValidator:
    """Reports a value of another type in one sentence. Without it, pydantic reports the first
    alternative of a union, with the name of its Python type as if that were a field.
    """

    def check(value: JsonValue, handler: ValidatorFunctionWrapHandler) -> object:
        try:
            return handler(value)
        except ValidationError as error:
            raise ValueError(f"it is {_found(value)}, expected {what}") from error

    return WrapValidator(check)


def _found(value: JsonValue) -> str:
    """The JSON type, and what the items of a list are."""
    if not isinstance(value, list):
        return json_kind(value)
    items = dict.fromkeys(map(_item, value[:FIRST_ITEMS]))
    return f"a list with {' and '.join(items)}" if items else "an empty list"


def _item(value: JsonValue) -> str:
    return f"{value}" if isinstance(value, int | float) else json_kind(value)


PROMPT = expected(
    "a string, a list of strings, a list of token ids (integers from 0), or a list of such lists"
)
Prompt = Annotated[
    str | FailFastList[TokenId] | FailFastList[str] | FailFastList[FailFastList[TokenId]], PROMPT
]
Schema = Annotated[JSONObject | str | None, expected("a JSON schema: an object, or its text")]


class RequestModel(BaseModel):
    """A JSON object; unknown fields are kept, for `unknown_fields`. strict: "5" is no number, and 1
    is not true. null for a field that has a default means the default.
    """

    model_config = ConfigDict(extra="allow", protected_namespaces=(), strict=True)

    # The types of `tools` that this server can run: all others are left out.
    tool_types: ClassVar[Sequence[str]] = ()

    @model_validator(mode="before")
    @classmethod
    def _normalize(cls, value: JsonValue) -> JsonValue:
        check_fields(value)
        if not isinstance(value, dict):
            return value
        if None in value.values():
            value = {
                name: item
                for name, item in value.items()
                if item is not None or not cls._has_default(name)
            }
        return _drop_other_tools(value, cls.tool_types) if cls.tool_types else value

    @classmethod
    def _has_default(cls, name: str) -> bool:
        fields = cls.model_fields.items()
        return any((each.alias or key) == name and not each.is_required() for key, each in fields)


def _drop_other_tools(body: JSONObject, types: Sequence[str]) -> JSONObject:
    """Tools of other types become unknown fields, such as tools.0. Invalid tools stay."""
    tools = body.get("tools")
    if not isinstance(tools, list) or len(tools) > TOOLS:
        return body
    kinds = [tool.get("type") if isinstance(tool, dict) else None for tool in tools]
    others = [isinstance(kind, str) and kind not in types for kind in kinds]
    if not any(others):
        return body
    rest = [tool for tool, is_other in zip(tools, others, strict=True) if not is_other]
    left_out = {f"tools.{index}": tools[index] for index, other in enumerate(others) if other}
    return {**body, "tools": rest, **left_out}


class StreamOptions(RequestModel):
    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool | None = None  # OpenAI's padding against traffic analysis: ignored


# Kinds of structured output, as fields of Structured. Requests say json for the first.
KINDS_OF_OUTPUT = ("json_schema", "json_object", "regex", "choice", "grammar")


class StructuredOutputs(RequestModel):
    """Exactly one of the first five, as in vLLM.

    disable_additional_properties  of all JSON schemas of the request: whether objects have no other
                                   properties than those that the schema names
    """

    json_schema: Schema = Field(None, alias="json")
    regex: str | None = None
    choice: FailFastList[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_additional_properties: bool | None = None

    def kinds(self) -> dict[str, object]:
        """Those that are set, as fields of Structured."""
        values = {name: getattr(self, name) for name in KINDS_OF_OUTPUT}
        return {name: value for name, value in values.items() if value not in (None, False)}

    @model_validator(mode="after")
    def _check_kind(self) -> Self:
        kinds = ["json" if name == "json_schema" else name for name in self.kinds()]
        if len(kinds) == 1 or (not kinds and self.disable_additional_properties is not None):
            return self
        kinds += [f"the unknown field {name!r:.40}" for name in list(self.model_extra or ())[:3]]
        raise ValueError(
            f"it has {' and '.join(kinds) or 'nothing'}, expected exactly one of json, "
            f"{', '.join(KINDS_OF_OUTPUT[1:])}"
        )


class JsonSchema(RequestModel):
    name: str
    description: str | None = None
    # OpenAI's client sends `schema`. Without it, any JSON object is accepted.
    schema_: JSONObject | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(RequestModel):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class Function(RequestModel):
    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    parameters: JSONObject | None = None
    strict: bool | None = None


class Tool(RequestModel):
    type: Literal["function"]
    function: Function


class NamedFunction(RequestModel):
    name: str


class NamedTool(RequestModel):
    type: Literal["function"] = "function"
    function: NamedFunction


class ToolSubset(RequestModel):
    mode: Literal["auto", "required"]
    tools: FailFastList[NamedTool]

    tool_types = ("function",)


class AllowedTools(RequestModel):
    """The model may call some of the request's tools only."""

    type: Literal["allowed_tools"] = "allowed_tools"
    allowed_tools: ToolSubset


ToolChoice = Literal["none", "auto", "required"] | NamedTool | AllowedTools


class SamplingFields(RequestModel):
    """Fields of all endpoints that generate text, OpenAI's and Anthropic's; vLLM's extensions."""

    temperature: Temperature | None = None
    top_p: FiniteFloat | None = None
    seed: int | None = None
    presence_penalty: FiniteFloat | None = None
    frequency_penalty: FiniteFloat | None = None
    stream: bool | None = None
    top_k: Int64 | None = None
    min_p: FiniteFloat | None = None
    repetition_penalty: FiniteFloat | None = None
    min_tokens: Int64 = 0
    ignore_eos: bool = False
    stop_token_ids: FailFastList[TokenId] | None = None
    allowed_token_ids: FailFastList[TokenId] | None = None
    bad_words: FailFastList[str] | None = None
    structured_outputs: StructuredOutputs | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] = 0
    cache_salt: str | None = None


class SamplingRequest(SamplingFields):
    """Fields of OpenAI's endpoints that generate text, with vLLM's extensions."""

    model: str | None = None
    stop: Annotated[str | FailFastList[str] | None, expected("a string or a list of strings")] = (
        None
    )
    logit_bias: Annotated[
        dict[TokenIdKey, FiniteFloat] | None,
        expected("an object of token ids with numbers"),
        BeforeValidator(_check_logit_bias),
    ] = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    guided_json: Schema = None
    guided_regex: str | None = None
    guided_choice: FailFastList[str] | None = None
    guided_grammar: str | None = None
    return_token_ids: bool = False
    # accepted and ignored
    user: str | None = None


class GenerationRequest(SamplingRequest):
    """Fields shared by completions and chat completions."""

    max_tokens: Int64 | None = None
    n: Annotated[int, Field(ge=1, le=128)] = 1
    prompt_logprobs: Int64 | None = None
    truncate_prompt_tokens: Int64 | None = None
    thinking_token_budget: Int64 | None = None
    stream_options: StreamOptions | None = None

    @property
    def effective_stream_options(self) -> StreamOptions:
        """The options, all with their defaults if there are none."""
        return self.stream_options or StreamOptions()


class CompletionRequest(GenerationRequest):
    prompt: Prompt
    echo: bool = False
    logprobs: Int64 | None = None
    best_of: int | None = None
    suffix: str | None = None
    add_special_tokens: bool = True
    response_format: ResponseFormat | None = None


class ChatRequest(GenerationRequest):
    messages: Messages
    max_completion_tokens: Int64 | None = None
    logprobs: bool | None = None
    top_logprobs: Int64 | None = None
    response_format: ResponseFormat | None = None
    tools: FailFastList[Tool] | None = None
    tool_choice: Annotated[
        ToolChoice | None,
        expected(
            "none, auto, required, an object with type function and function.name, or one with "
            "type allowed_tools and allowed_tools: {mode, tools}"
        ),
    ] = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: JSONObject | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    reasoning_effort: str | None = None
    # accepted and ignored
    metadata: JSONObject | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    modalities: FailFastList[Literal["text"]] | None = None
    verbosity: str | None = None

    tool_types = ("function",)


class EmbeddingRequest(RequestModel):
    input: Prompt
    model: str | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Field(ge=1)] | None = None
    pooling: Literal["mean", "last"] = "mean"
    normalize: bool = True
    user: str | None = None


class TokenizeRequest(RequestModel):
    """Either prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool = True
    messages: Messages | None = None
    tools: FailFastList[Tool] | None = None
    chat_template_kwargs: JSONObject | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    return_token_strs: bool = False

    tool_types = ("function",)


class DetokenizeRequest(RequestModel):
    model: str | None = None
    tokens: FailFastList[TokenId]


class LoadAdapterRequest(RequestModel):
    lora_name: Annotated[str, Field(min_length=1, max_length=256)]
    lora_path: str


class UnloadAdapterRequest(RequestModel):
    lora_name: str
