"""tool_choice "required" and named functions: a JSON schema forces the tool calls."""

from collections.abc import Sequence
from typing import ClassVar

from atomc.files.json_types import JSON
from atomc.runtime.server.parsers.message_deltas import DeltaBuilder, MessageDelta
from atomc.runtime.server.parsers.tool_parsers.json_call import JsonCallParser
from atomc.runtime.server.service.protocol import Function, JSONObject

DEFINITIONS = ("$defs", "definitions")


def arguments_schema(function: Function) -> JSONObject:
    """The schema of the arguments, which are an object; any for a function without parameters.
    Raises ValueError for a schema that allows none.
    """
    parameters = function.parameters or {}
    kind = parameters.get("type")
    if kind not in (None, "object") and not (isinstance(kind, list) and "object" in kind):
        raise ValueError(
            f"the parameters of {function.name!r} have the type {kind!r:.80}, expected 'object': "
            "arguments are an object"
        )
    return {**parameters, "type": "object"}


def calls_schema(functions: Sequence[Function], parallel: bool) -> JSONObject:
    """The schema of a list of calls, exactly one unless `parallel`: [{"name": "f", "parameters":
    {...}}].

    Moves $defs to the top level, where $ref expects them. Raises ValueError if two functions have
    different definitions of one name.
    """
    definitions: dict[str, JSONObject] = {}
    calls: list[JSON] = []
    for function in functions:
        parameters = arguments_schema(function)
        for key in DEFINITIONS:
            defined = parameters.pop(key, None) or {}
            if not isinstance(defined, dict):
                raise ValueError(
                    f"{key} in the parameters of {function.name!r} is {defined!r:.80}, "
                    "expected an object"
                )
            for name, definition in defined.items():
                if definitions.setdefault(key, {}).setdefault(name, definition) != definition:
                    raise ValueError(
                        f"two tools have different definitions of {name!r} in {key}: rename one"
                    )
        properties: JSONObject = {"name": {"const": function.name}, "parameters": parameters}
        calls.append(
            {
                "type": "object",
                "properties": properties,
                "required": [*properties],
                "additionalProperties": False,
            }
        )
    limit: JSONObject = {} if parallel else {"maxItems": 1}
    return {"type": "array", "items": {"anyOf": calls}, "minItems": 1, **limit, **definitions}


class NamedToolParser:
    """Parses text that consists of the arguments of one call of this function."""

    markers: ClassVar[tuple[str, ...]] = ()

    def __init__(self, name: str) -> None:
        self._name = name
        self._deltas = DeltaBuilder()

    def feed(self, text: str) -> list[MessageDelta]:
        if text and not self._deltas.num_calls:
            self._deltas.call(self._name)
        if text:
            self._deltas.arguments(text)
        return self._deltas.take()

    def finish(self) -> list[MessageDelta]:
        return []


class RequiredToolParser:
    """Parses a list of calls that matches `calls_schema`."""

    markers: ClassVar[tuple[str, ...]] = ()

    def __init__(self) -> None:
        self._deltas = DeltaBuilder()
        self._call: JsonCallParser | None = None
        self._started = False

    def feed(self, text: str) -> list[MessageDelta]:
        while text:
            if self._call is None:
                index = text.find("{")
                if index < 0:
                    break
                text = text[index:]
                self._call, self._started = JsonCallParser(), False
            text = text[self._call.feed(text) :]
            if self._call.started:
                if not self._started:
                    self._deltas.call(self._call.name)
                    self._started = True
                self._deltas.arguments(self._call.take())
            if self._call.done or self._call.invalid:
                self._call = None
        return self._deltas.take()

    def finish(self) -> list[MessageDelta]:
        return []
