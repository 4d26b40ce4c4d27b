"""The JSON objects of OpenAI's API that responses consist of, with vLLM's extensions, and those of
the server's own endpoints.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal, NotRequired, TypeAlias

import msgspec
from pydantic import GetPydanticSchema, JsonValue, WithJsonSchema
from pydantic.json_schema import SkipJsonSchema
from pydantic_core import core_schema
from typing_extensions import TypedDict  # pydantic reads no other before Python 3.12

_AnyValue = GetPydanticSchema(lambda _, __: core_schema.any_schema())
# A value that is encoded already: of the other type of its union, or the scores of a token.
Encoded: TypeAlias = Annotated[msgspec.Raw, _AnyValue, SkipJsonSchema()]
EncodedScores: TypeAlias = Annotated[
    msgspec.Raw, _AnyValue, WithJsonSchema({"type": ["object", "null"]})
]


class PromptTokensDetails(TypedDict):
    """image_tokens: only if the prompt has images."""

    cached_tokens: int
    image_tokens: NotRequired[int]


class Usage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class CompletionTokensDetails(TypedDict):
    reasoning_tokens: int


class ChatUsage(Usage):
    completion_tokens_details: CompletionTokensDetails


class ChoiceFields(TypedDict):
    """What choices of all formats have."""

    index: int
    finish_reason: str | None
    token_ids: NotRequired[Sequence[int]]


class AnswerFields(TypedDict):
    id: str
    created: int
    model: str


# Completions


class CompletionLogprobs(TypedDict):
    """One item per token in each list."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | Encoded | None]
    text_offset: list[int]


class CompletionChoice(ChoiceFields):
    text: str
    logprobs: CompletionLogprobs | None
    stop_reason: int | str | None
    prompt_logprobs: NotRequired[list[EncodedScores]]
    prompt_token_ids: NotRequired[Sequence[int]]


class Completion(AnswerFields):
    """A response, or a chunk of a stream."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: NotRequired[Usage]


# Chat completions


class FunctionCall(TypedDict):
    arguments: str
    name: NotRequired[str]


class ToolCall(TypedDict):
    """A tool call. Chunks have an index; those after the first one only add arguments."""

    function: FunctionCall
    index: NotRequired[int]
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]


class ChatMessage(TypedDict):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCall]]


class ChatDelta(TypedDict, total=False):
    role: Literal["assistant"]
    content: str
    reasoning_content: str
    tool_calls: list[ToolCall]


class ChatTopLogprob(TypedDict):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(ChatTopLogprob):
    top_logprobs: list[ChatTopLogprob]


class ChatLogprobs(TypedDict):
    content: list[ChatTokenLogprob | Encoded]
    refusal: None


class ChatChoice(ChoiceFields):
    message: ChatMessage
    logprobs: ChatLogprobs | None
    stop_reason: int | str | None


class ChatChunkChoice(ChoiceFields):
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    stop_reason: NotRequired[int | str | None]


class ChatCompletion(AnswerFields):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: ChatUsage
    prompt_token_ids: NotRequired[Sequence[int]]
    prompt_logprobs: NotRequired[list[EncodedScores]]


class ChatChunk(AnswerFields):
    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: NotRequired[ChatUsage]
    prompt_token_ids: NotRequired[Sequence[int]]


# Embeddings


class Embedding(TypedDict):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(TypedDict):
    prompt_tokens: int
    total_tokens: int


class Embeddings(TypedDict):
    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


# Models and tokens


class Model(TypedDict):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int
    input_modalities: list[Literal["text", "image"]]


class Models(TypedDict):
    object: Literal["list"]
    data: list[Model]


class Tokens(TypedDict):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizedText(TypedDict):
    prompt: str


# The server's own


class Version(TypedDict):
    version: str


class Load(TypedDict):
    server_load: int


class Status(TypedDict):
    status: str


class Health(Status):
    engines: NotRequired[dict[int, str]]


class Profile(Status):
    file: NotRequired[JsonValue]


class Sleeping(TypedDict):
    is_sleeping: bool


class ExpertTokens(TypedDict):
    tokens: Mapping[str, Sequence[int]]
