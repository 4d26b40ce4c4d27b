"""How the choices of a chat may call tools: its tools and tool_choice. "required" and a named
function force the calls by a JSON schema.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import ClassVar, Literal

from atomc.files.json_types import JSON
from atomc.runtime.constrained.closed_schema import DEFINITIONS
from atomc.runtime.requests.sampling_params import Structured
from atomc.runtime.server.http.limits import TOOLS, check_length
from atomc.runtime.server.http.responses import invalid, refusing
from atomc.runtime.server.parsers.message_deltas import (
    ContentDelta,
    DeltaBuilder,
    MessageDelta,
    Parser,
    ToolCallStart,
    call_id,
)
from atomc.runtime.server.parsers.output_parser import special_tokens
from atomc.runtime.server.parsers.tool_parsers import TOOL_PARSERS, tool_parser
from atomc.runtime.server.parsers.tool_parsers.forced_grammar import ForcedFunction, forced_grammar
from atomc.runtime.server.parsers.tool_parsers.formats import ALIASES, FORMATS
from atomc.runtime.server.parsers.tool_parsers.json_call import JsonCallParser
from atomc.runtime.server.service.model_info import ModelInfo
from atomc.runtime.server.service.protocol import (
    AllowedTools,
    ChatRequest,
    Function,
    JSONObject,
    NamedTool,
    Tool,
)
from atomc.runtime.server.service.sampling import additional_properties, check_structured
from atomc.runtime.server.service.service import Service

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ToolMode:
    """How the choices of a request may call tools.

    template_tools   the tools passed to the chat template
    parser_name      the tool parser; None if the format is unknown, or if it is not forced, where
                     a call is: then the text is JSON
    schemas          of the arguments, by function
    function_name    the function that tool_choice names
    required         tool_choice is "required"
    single_call      calls after the first one are left out, for tool_choice "auto"
    structured       the structured output that forces the calls, for a named function and for
                     "required"
    """

    template_tools: list[JSONObject] | None = None
    parser_name: str | None = None
    function_name: str | None = None
    required: bool = False
    single_call: bool = False
    structured: Structured | None = None
    schemas: Mapping[str, JSONObject] = field(default_factory=dict)

    def parser(self) -> Parser | None:
        """A new parser for one choice."""
        if self.parser_name is not None:
            parser = tool_parser(self.parser_name, self.schemas)
            return parser if self.structured is None else ForcedParser(parser, self.function_name)
        if self.function_name is not None:
            return NamedToolParser(self.function_name)
        return RequiredToolParser() if self.required else None


def tool_mode(service: Service, body: ChatRequest) -> ToolMode:
    """Raises a 400 for a tool_choice that is not possible."""
    check_length(TOOLS, body.tools, "tools", "tools")
    tools, choice = _allowed(body)
    choice = choice or ("auto" if tools else "none")
    if not tools and choice in ("none", "auto"):
        return ToolMode()
    if not tools:
        raise invalid("tool_choice requires a tool call, but tools is empty", "tool_choice")
    template_tools = [tool.model_dump(exclude_none=True) for tool in tools]
    if choice == "none":
        return ToolMode()
    if choice == "auto":
        if service.model.tools is None:
            _warn_of_unknown_format()
        return ToolMode(
            template_tools,
            service.model.tools,
            single_call=body.parallel_tool_calls is False,
            schemas=_schemas(tools),
        )
    functions = [tool.function for tool in tools]
    named = _function_named(functions, choice.function.name) if choice != "required" else None
    with refusing("tools"):
        parser_name, structured = _forced(
            service.model,
            functions if named is None else [named],
            named=named is not None,
            several=named is None and body.parallel_tool_calls is not False,
            is_open=additional_properties(body, service.config),
        )
    return ToolMode(
        template_tools,
        parser_name,
        function_name=None if named is None else named.name,
        required=named is None,
        structured=structured,
        schemas=_schemas(tools),
    )


def _schemas(tools: Sequence[Tool]) -> dict[str, JSONObject]:
    return {tool.function.name: tool.function.parameters or {} for tool in tools}


@cache
def _warn_of_unknown_format() -> None:
    log.warning(
        "the format of this model's tool calls is unknown, so that its answers with tools are "
        "content: start the server with --tool-call-parser, one of %s",
        ", ".join(TOOL_PARSERS),
    )


def _allowed(
    body: ChatRequest,
) -> tuple[Sequence[Tool], Literal["none", "auto", "required"] | NamedTool | None]:
    """The tools that tool_choice allows, and which of these are called."""
    tools, choice = body.tools or [], body.tool_choice
    if not isinstance(choice, AllowedTools):
        return tools, choice
    names = [tool.function.name for tool in tools]
    allowed = [tool.function.name for tool in choice.allowed_tools.tools]
    if missing := [name for name in allowed if name not in names]:
        raise invalid(
            f"tool_choice allows {missing[0]!r:.80}, expected one of the tools: {', '.join(names)}",
            "tool_choice",
        )
    return [tool for tool in tools if tool.function.name in allowed], choice.allowed_tools.mode


def _function_named(functions: Sequence[Function], name: str) -> Function:
    named = next((function for function in functions if function.name == name), None)
    if named is None:
        names = ", ".join(function.name for function in functions)
        raise invalid(
            f"tool_choice names {name!r}, expected one of the tools: {names}", "tool_choice"
        )
    return named


# Forced calls


def _forced(
    model: ModelInfo, functions: Sequence[Function], *, named: bool, several: bool, is_open: bool
) -> tuple[str | None, Structured]:
    """The parser and the grammar of calls in the format of the model; in JSON, without the name of
    a parser, where that format cannot be forced. Raises ValueError for a schema without objects.
    """
    form = FORMATS.get(ALIASES.get(model.tools or "", model.tools or ""))
    forced = [ForcedFunction(each.name, arguments_schema(each)) for each in functions]
    if form is not None and model.tokenizer is not None:
        special = special_tokens(model.tokenizer)
        grammar = forced_grammar(form, forced, special, several=several)
        if grammar is not None:
            structured = Structured(
                grammar=grammar, additional_properties=is_open, adapts_schemas=True
            )
            return model.tools, check_structured(structured)
    schema = forced[0].schema if named else calls_schema(functions, several)
    return None, check_structured(Structured(schema, additional_properties=is_open))


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


class ForcedParser:
    """A Parser of calls that a grammar forces in the format of the model: a call that is cut before
    its name is known is no content, but a call of the function that the request names.
    """

    def __init__(self, parser: Parser, function_name: str | None) -> None:
        self._parser, self._name, self._is_called = parser, function_name, False

    @property
    def markers(self) -> tuple[str, ...]:
        return self._parser.markers

    def feed(self, text: str) -> list[MessageDelta]:
        return self._calls(self._parser.feed(text))

    def finish(self) -> list[MessageDelta]:
        deltas = self._calls(self._parser.finish())
        if self._name is not None and not self._is_called:
            deltas.append(ToolCallStart(0, call_id(), self._name))
        return deltas

    def _calls(self, deltas: Sequence[MessageDelta]) -> list[MessageDelta]:
        calls: list[MessageDelta] = [
            delta for delta in deltas if not isinstance(delta, ContentDelta)
        ]
        self._is_called |= bool(calls)
        return calls


class JsonCallsParser:
    """A Parser of calls that a grammar forces in JSON, without markers."""

    markers: ClassVar[tuple[str, ...]] = ()

    def __init__(self) -> None:
        self._deltas = DeltaBuilder()

    def finish(self) -> list[MessageDelta]:
        return []


class NamedToolParser(JsonCallsParser):
    """Parses text that consists of the arguments of one call of this function."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def feed(self, text: str) -> list[MessageDelta]:
        if text and not self._deltas.num_calls:
            self._deltas.call(self._name)
        if text:
            self._deltas.arguments(text)
        return self._deltas.take()


class RequiredToolParser(JsonCallsParser):
    """Parses a list of calls that matches `calls_schema`."""

    def __init__(self) -> None:
        super().__init__()
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
