"""Calls that the client insists on (tool_choice "required", or a function by name), made certain by a JSON schema."""

from collections.abc import Sequence
from typing import Any, ClassVar

from atomc.runtime.server.message_deltas import DeltaBuilder, MessageDelta
from atomc.runtime.server.protocol import Function
from atomc.runtime.server.tool_parsers.json_call import JsonCallParser

ANYTHING = {"type": "object"}
DEFINITIONS = ("$defs", "definitions")


def arguments_schema(function: Function) -> dict[str, Any]:
    """What the arguments must look like; a function without parameters takes any object."""
    return function.parameters or ANYTHING


def calls_schema(functions: Sequence[Function], parallel: bool) -> dict[str, Any]:
    """A list of calls of these functions, exactly one unless parallel: [{"name": "f", "parameters": {...}}].

    Definitions move to the top, where references look for them. Raises ValueError if two functions define one name
    differently.
    """
    definitions: dict[str, dict[str, Any]] = {}
    calls = []
    for function in functions:
        parameters = dict(arguments_schema(function))
        for key in DEFINITIONS:
            defined = parameters.pop(key, {})
            if not isinstance(defined, dict):
                raise ValueError(f"{key} in the parameters of {function.name!r} is {defined!r:.80}, expected an object")
            for name, definition in defined.items():
                if definitions.setdefault(key, {}).setdefault(name, definition) != definition:
                    raise ValueError(f"two tools define {name!r} in {key}, and not alike: rename one")
        properties = {"name": {"const": function.name}, "parameters": parameters}
        calls.append({"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False})
    most = {} if parallel else {"maxItems": 1}
    return {"type": "array", "items": {"anyOf": calls}, "minItems": 1, **most, **definitions}


class NamedToolParser:
    """The text is the arguments of one call of this function."""

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
    """The text is a list of calls, as `calls_schema` has it."""

    markers: ClassVar[tuple[str, ...]] = ()

    def __init__(self) -> None:
        self._deltas = DeltaBuilder()
        self._call: JsonCallParser | None = None
        self._begun = False

    def feed(self, text: str) -> list[MessageDelta]:
        while text:
            if self._call is None:
                at = text.find("{")
                if at < 0:
                    break
                text = text[at:]
                self._call, self._begun = JsonCallParser(), False
            text = text[self._call.feed(text) :]
            if self._call.started:
                if not self._begun:
                    self._deltas.call(self._call.name)
                    self._begun = True
                self._deltas.arguments(self._call.take())
            if self._call.done or self._call.broken:
                self._call = None
        return self._deltas.take()

    def finish(self) -> list[MessageDelta]:
        return []
