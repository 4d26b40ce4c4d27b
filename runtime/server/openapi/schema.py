"""The OpenAPI schema of the server: FastAPI's, with descriptions, answers and keys."""

from collections.abc import Awaitable, Callable, Iterator, Sequence
from inspect import signature
from pathlib import Path
from typing import Any, Literal, NamedTuple

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import TypeAdapter
from starlette.responses import Response

from atomc.files.json_file import read_json

Schema = dict[str, Any]
DESCRIPTION = """\
Serves a language model with OpenAI's APIs (completions, chat completions, responses, embeddings),
Anthropic's Messages API, and vLLM's additional fields. Every error has a JSON body with a message.
With `stream` set, an answer consists of server-sent events.
"""
KEYS: Schema = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "A key of --api-key."},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}


class Endpoint(NamedTuple):
    """An operation of the server.

    run      gets the Service, and of the request what its other parameters name; the first line of
             its docstring is the summary in the schema. Returns the JSON answer, or a Response
    caller   public: without a key; operator: it concerns all users, and needs an admin key if there
             are any
    answer   the type of the JSON answer of a `run` that returns a Response; None: text
    streams  the answer may be a stream of events
    hidden   not in the schema
    """

    method: Literal["GET", "POST", "DELETE"]
    path: str
    run: Callable[..., Awaitable[object]]
    caller: Literal["public", "user", "operator"] = "user"
    answer: Any = None
    streams: bool = False
    hidden: bool = False

    def answer_type(self) -> Any:
        """The type of the JSON answer; None: text."""
        returned = signature(self.run).return_annotation
        return self.answer if returned is Response else returned


def field_meanings() -> dict[str, str]:
    """What the fields of requests and answers mean: by name, or by the name of the object and the
    field where the meaning differs.
    """
    sections = read_json(Path(__file__).with_name("fields.json"))
    return {name: meaning for section in sections.values() for name, meaning in section.items()}


def openapi_schema(app: FastAPI, version: str, endpoints: Sequence[Endpoint]) -> Schema:
    operations = {endpoint.run.__name__: endpoint for endpoint in endpoints if not endpoint.hidden}
    schema = get_openapi(title="atomc", version=version, description=DESCRIPTION, routes=app.routes)
    components, meanings = schema["components"], field_meanings()
    del components["schemas"]["HTTPValidationError"], components["schemas"]["ValidationError"]
    answers, definitions = TypeAdapter.json_schemas(
        [
            (name, "validation", TypeAdapter(answer))
            for name, endpoint in operations.items()
            if (answer := endpoint.answer_type()) is not None
        ],
        ref_template="#/components/schemas/{model}",
    )
    components["schemas"] |= definitions["$defs"]
    components["securitySchemes"] = KEYS
    schema["security"] = [{name: []} for name in KEYS]
    for operation in _operations(schema):
        name = operation["operationId"]
        endpoint = operations[name]
        description = str(endpoint.run.__doc__).partition("\n")[0]
        operation |= {"summary": description.removesuffix("."), "description": description}
        # Invalid fields are a 400, not FastAPI's 422.
        operation["responses"].pop("422", None)
        content: Schema = {"text/plain": {"schema": {"type": "string"}}}
        if (name, "validation") in answers:
            content = {"application/json": {"schema": answers[name, "validation"]}}
        if endpoint.streams:
            content["text/event-stream"] = {"schema": {"type": "string"}}
        operation["responses"]["200"] = {"description": "Success", "content": content}
        if endpoint.caller == "public":
            operation["security"] = []
        for parameter in operation.get("parameters", ()):
            parameter["description"] = meanings[parameter["name"]]
    for name, component in components["schemas"].items():
        for field, value in component.get("properties", {}).items():
            if meaning := meanings.get(f"{name}.{field}") or meanings.get(field):
                value.setdefault("description", meaning)
    return schema


def _operations(schema: Schema) -> Iterator[Schema]:
    for operations in schema["paths"].values():
        yield from operations.values()
