"""The OpenAPI schema of the server: FastAPI's, with descriptions, answers and keys."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import TypeAdapter

from atomc.runtime.server.anthropic.response import AnthropicMessage, InputTokens
from atomc.runtime.server.openapi.fields import FIELDS
from atomc.runtime.server.responses.response import (
    DeletedResponse,
    InputItems,
    ModelResponse,
)
from atomc.runtime.server.service.response_types import (
    ChatCompletion,
    Completion,
    DetokenizedText,
    Embeddings,
    ExpertTokens,
    Health,
    Load,
    Model,
    Models,
    Profile,
    Sleeping,
    Status,
    Tokens,
    Version,
)

Schema = dict[str, Any]
DESCRIPTION = """\
Serves a language model with OpenAI's APIs (completions, chat completions, responses, embeddings),
Anthropic's Messages API, and vLLM's additional fields. Every error has a JSON body with a message.
With `stream` set, an answer consists of server-sent events.
"""
# Operations, by the name of the route: what they do, and the type of the JSON answer (None: text).
OPERATIONS: Mapping[str, tuple[str, Any]] = {
    "models": ("List the served models", Models),
    "one_model": ("Get a served model", Model),
    "complete": ("Complete prompts", Completion),
    "chat": ("Answer a chat", ChatCompletion),
    "create_message": ("Answer a chat, in Anthropic's format", AnthropicMessage),
    "count_message_tokens": ("Count the tokens of a chat in Anthropic's format", InputTokens),
    "create_response": ("Answer items of a conversation, and store the response", ModelResponse),
    "retrieve_response": ("Get a stored response", ModelResponse),
    "delete_response": ("Delete a stored response", DeletedResponse),
    "list_input_items": ("List the conversation before a stored response", InputItems),
    "embed": ("Compute embeddings of texts", Embeddings),
    "tokenize": ("Get the tokens of a prompt or a chat", Tokens),
    "detokenize": ("Get the text of tokens", DetokenizedText),
    "version": ("Get the version of atomc", Version),
    "load": ("Get the number of unfinished choices", Load),
    "health": ("Check that an engine's process runs and responds", Health),
    "ready": ("Check that an engine generates tokens", Status),
    "metrics": ("Get Prometheus metrics", None),
    "experts": ("Get how many tokens each expert got", ExpertTokens),
    "compiler": ("Get the compiler's report", dict[str, Any]),
    "reset_prefix_cache": ("Forget all cached prompts", Status),
    "load_adapter": ("Load a LoRA adapter", Status),
    "unload_adapter": ("Unload a LoRA adapter", Status),
    "sleep": ("Free the KV cache and CUDA graphs", Status),
    "wake_up": ("Allocate what /sleep has freed", Status),
    "is_sleeping": ("Check whether the engines sleep", Sleeping),
    "start_profile": ("Start torch's profiler in the engine", Profile),
    "stop_profile": ("Stop the profiler, and write its file", Profile),
}
STREAMED = ("complete", "chat", "create_message", "create_response")
KEYS: Schema = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "A key of --api-key."},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}


def openapi_schema(app: FastAPI, version: str, open_paths: Collection[str]) -> Schema:
    """open_paths: those that need no key."""
    schema = get_openapi(title="atomc", version=version, description=DESCRIPTION, routes=app.routes)
    components = schema["components"]
    del components["schemas"]["HTTPValidationError"], components["schemas"]["ValidationError"]
    answers, definitions = TypeAdapter.json_schemas(
        [(name, "validation", TypeAdapter(kind)) for name, (_, kind) in OPERATIONS.items() if kind],
        ref_template="#/components/schemas/{model}",
    )
    components["schemas"] |= definitions["$defs"]
    components["securitySchemes"] = KEYS
    schema["security"] = [{name: []} for name in KEYS]
    for path, operation in _operations(schema):
        name = operation["operationId"]
        summary, kind = OPERATIONS[name]
        operation |= {"summary": summary, "description": f"{summary}."}
        # Invalid fields are a 400, not FastAPI's 422.
        operation["responses"].pop("422", None)
        content: Schema = {"text/plain": {"schema": {"type": "string"}}}
        if kind is not None:
            content = {"application/json": {"schema": answers[name, "validation"]}}
        if name in STREAMED:
            content["text/event-stream"] = {"schema": {"type": "string"}}
        operation["responses"]["200"] = {"description": "Success", "content": content}
        if path in open_paths:
            operation["security"] = []
        for parameter in operation.get("parameters", ()):
            parameter["description"] = FIELDS[parameter["name"]]
    for name, component in components["schemas"].items():
        for field, value in component.get("properties", {}).items():
            if meaning := FIELDS.get(f"{name}.{field}") or FIELDS.get(field):
                value.setdefault("description", meaning)
    return schema


def _operations(schema: Schema) -> Iterator[tuple[str, Schema]]:
    for path, operations in schema["paths"].items():
        for operation in operations.values():
            yield path, operation
