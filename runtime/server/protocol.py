"""Request bodies: OpenAI's fields and vLLM's extensions.

Fields about the client or about OpenAI's own service are accepted and ignored. What becomes of
unknown fields is in unknown_fields.py.
"""

from typing import Annotated, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    SkipValidation,
    model_validator,
)

from atomc.runtime.server.limits import BIASED_TOKENS, check_fields

T = TypeVar("T")
# Report the first invalid item only.
FailFastList = Annotated[list[T], Field(fail_fast=True)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
FiniteFloat = Annotated[float, Field(allow_inf_nan=False)]
Temperature = Annotated[FiniteFloat, Field(le=2)]
Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]
# Values of any JSON type: json.loads has made them, so they are not validated again.
JSONObject = dict[str, SkipValidation[JsonValue]]
Messages = FailFastList[JSONObject]


def _check_logit_bias(value: JsonValue) -> JsonValue:
    if isinstance(value, dict) and len(value) > BIASED_TOKENS:
        raise ValueError(f"it has {len(value)} tokens, at most {BIASED_TOKENS} are allowed")
    return value


class RequestModel(BaseModel):
    """A JSON object; unknown fields are kept, for `unknown_fields`."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    _fields = model_validator(mode="before")(check_fields)


class StreamOptions(RequestModel):
    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool | None = None  # OpenAI's padding against traffic analysis: ignored


class StructuredOutputs(RequestModel):
    """Exactly one of the first five, as in vLLM.

    disable_additional_properties  of all JSON schemas of the request: whether objects have no other
                                   properties than those that the schema names
    """

    json_: JSONObject | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: FailFastList[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_additional_properties: bool | None = None


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


class SamplingRequest(RequestModel):
    """Fields shared by all endpoints that generate text."""

    model: str | None = None
    temperature: Temperature | None = None
    top_p: FiniteFloat | None = None
    seed: int | None = None
    stop: str | FailFastList[str] | None = None
    presence_penalty: FiniteFloat | None = None
    frequency_penalty: FiniteFloat | None = None
    logit_bias: Annotated[dict[TokenId, FiniteFloat] | None, BeforeValidator(_check_logit_bias)] = (
        None
    )
    stream: bool | None = None
    # extensions of OpenAI's API
    top_k: Int64 | None = None
    min_p: FiniteFloat | None = None
    repetition_penalty: FiniteFloat | None = None
    min_tokens: Int64 = 0
    ignore_eos: bool = False
    stop_token_ids: FailFastList[TokenId] | None = None
    allowed_token_ids: FailFastList[TokenId] | None = None
    bad_words: FailFastList[str] | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    structured_outputs: StructuredOutputs | None = None
    guided_json: JSONObject | str | None = None
    guided_regex: str | None = None
    guided_choice: FailFastList[str] | None = None
    guided_grammar: str | None = None
    return_token_ids: bool = False
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] = 0
    cache_salt: str | None = None
    # accepted and ignored
    user: str | None = None


class GenerationRequest(SamplingRequest):
    """Fields shared by completions and chat completions."""

    max_tokens: Int64 | None = None
    n: Annotated[int, Field(ge=1, le=128)] = 1
    prompt_logprobs: Int64 | None = None
    truncate_prompt_tokens: Int64 | None = None
    stream_options: StreamOptions | None = None


class CompletionRequest(GenerationRequest):
    prompt: str | FailFastList[TokenId] | FailFastList[str] | FailFastList[FailFastList[TokenId]]
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
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
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


class EmbeddingRequest(RequestModel):
    input: str | FailFastList[TokenId] | FailFastList[str] | FailFastList[FailFastList[TokenId]]
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


class DetokenizeRequest(RequestModel):
    model: str | None = None
    tokens: FailFastList[TokenId]


class LoadAdapterRequest(RequestModel):
    lora_name: Annotated[str, Field(min_length=1, max_length=256)]
    lora_path: str


class UnloadAdapterRequest(RequestModel):
    lora_name: str
