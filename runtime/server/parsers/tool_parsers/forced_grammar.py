"""The grammar of calls that a request forces, in the model's own format: Lark, as llguidance reads
it, with JSON schemas in rules of their own (Structured.adapts_schemas).
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from atomc.files.json_types import JSON, JSONObject
from atomc.runtime.constrained.closed_schema import DEFINITIONS, as_list
from atomc.runtime.server.parsers.tool_parsers.argument_values import ParameterTypes
from atomc.runtime.server.parsers.tool_parsers.tool_format import (
    CALL,
    KEY,
    LONGEST,
    OBJECT,
    PARAMETERS,
    ToolFormat,
    words,
)

# What a schema may have, besides annotations, for its properties to be written one after another.
WRITABLE = {"type", "properties", "required", "additionalProperties", *DEFINITIONS}
ANNOTATIONS = {"title", "description", "default", "examples", "deprecated", "$schema", "$id"}


class ForcedFunction(NamedTuple):
    """schema: of its arguments, an object."""

    name: str
    schema: JSONObject


def forced_grammar(
    form: ToolFormat,
    functions: Sequence[ForcedFunction],
    special_tokens: Mapping[str, int],
    *,
    several: bool,
) -> str | None:
    """The grammar of one call of these functions, or of several; None if this format cannot be
    forced to keep a schema.

    special_tokens   texts of the tokenizer that are special, which no text of a grammar matches
    """
    rules = _Rules(form, special_tokens)
    if form.arguments not in (CALL, OBJECT, PARAMETERS):
        return None
    if not all(form.is_readable(name) and rules.is_plain(name) for name, _ in functions):
        return None
    if form.arguments == PARAMETERS and not all(map(rules.is_writable, functions)):
        return None
    begin, between, end = map(rules.text, (form.begin, form.between, form.end))
    further = ""
    if form.apart:
        further = f"({between} {begin} call {end})*"
        start = f"{begin} call {end} {further if several else ''}"
    else:
        further = f"({between} call)*"
        start = f"{begin} call {further if several else ''} {end}"
    return "\n".join([f"start: {start}", *rules.of_calls(functions)])


class _Rules:
    """Rules of the parts of a call."""

    def __init__(self, form: ToolFormat, special_tokens: Mapping[str, int]) -> None:
        self._form, self._special_tokens = form, special_tokens
        self._before, _, self._after = form.parameter.partition("{value}")
        # With this word a text ends for the parser, too.
        self._value_end = (words(self._after) or [""])[0]

    def text(self, text: str) -> str:
        """A text of the format. Empty if it is."""
        for token, number in self._special_tokens.items():
            before, marker, after = text.partition(token)
            if marker:
                return f"{self.text(before)} <[{number}]> {self.text(after)}"
        return json.dumps(text, ensure_ascii=False) if text else ""

    def of_calls(self, functions: Sequence[ForcedFunction]) -> Iterator[str]:
        yield f"call: {' | '.join(f'call_{i}' for i in range(len(functions)))}"
        head, _, tail = self._form.call.partition(f"{{{self._form.arguments}}}")
        for i, function in enumerate(functions):
            name = self._form.named.format(name=function.name, index=0)
            before = head.replace("{name}", name).replace("{id}", "000000000")
            rule = f"arguments_{i}"
            yield f"call_{i}: {self.text(before)} {rule} {self.text(tail)}"
            if self._form.arguments == CALL:
                yield f"{rule}: {_json_rule(self._call_schema(function))}"
            elif self._form.arguments == OBJECT:
                yield f"{rule}: {_json_rule(function.schema)}"
            else:
                yield from self._of_parameters(rule, function.schema)

    def _call_schema(self, function: ForcedFunction) -> JSONObject:
        name, arguments = self._form.keys
        inner = {key: value for key, value in function.schema.items() if key not in DEFINITIONS}
        properties: JSONObject = {key: {"type": "string"} for key in self._form.extra}
        properties |= {name: {"const": function.name}, arguments: inner}
        return {
            "type": "object",
            "properties": properties,
            "required": [*properties],
            "additionalProperties": False,
            **_definitions(function.schema),
        }

    def is_plain(self, text: str) -> bool:
        """Whether this text has no special token, and nothing that ends a value."""
        ends = (self._value_end, *self._special_tokens)
        return not any(end and end in text for end in ends)

    def is_writable(self, function: ForcedFunction) -> bool:
        """Whether parameters between tags can be forced to keep the schema."""
        schema, properties = function.schema, function.schema.get("properties") or {}
        if set(schema) - WRITABLE - ANNOTATIONS or not isinstance(properties, dict):
            return False
        if set(as_list(schema.get("required"))) - set(properties):
            return False
        if any(token in self._value_end for token in self._special_tokens):
            return False
        types = ParameterTypes(schema)
        return all(
            self._is_key(key) and (not _may_be_text(types.of(key)) or self._is_free(part))
            for key, part in properties.items()
        )

    def _is_key(self, key: str) -> bool:
        is_slot = re.fullmatch(f"{KEY}{{1,{LONGEST}}}", key) is not None
        return is_slot and key == key.strip() and self.is_plain(key)

    def _is_free(self, schema: JSON) -> bool:
        """Whether a schema that allows strings allows any text, or a list of texts."""
        if not isinstance(schema, dict):
            return True
        values = schema.get("enum")
        if isinstance(values, list):
            texts = [value for value in values if isinstance(value, str) and value]
            only = not set(schema) - {"type", "enum"} - ANNOTATIONS
            return only and len(texts) == len(values) and all(map(self.is_plain, texts))
        parts = as_list(schema.get("anyOf"))
        return not set(schema) - {"type", "anyOf"} - ANNOTATIONS and all(
            isinstance(part, dict) and not set(part) - {"type"} - ANNOTATIONS for part in parts
        )

    def _of_parameters(self, rule: str, schema: JSONObject) -> Iterator[str]:
        properties, required = schema.get("properties") or {}, as_list(schema.get("required"))
        assert isinstance(properties, dict)
        types = ParameterTypes(schema)
        names = [f"{rule}_{i}" for i in range(len(properties))]
        optional = ["" if key in required else "?" for key in properties]
        parts = (f"{name}{mark}" for name, mark in zip(names, optional, strict=True))
        together = " ".join(parts) or '""'
        yield f"{rule}: {together}"
        for name, (key, part) in zip(names, properties.items(), strict=True):
            is_text = _may_be_text(types.of(key))
            before = self._before.replace("{key}", key).replace("{is_string}", str(is_text).lower())
            values = part.get("enum") if isinstance(part, dict) and is_text else None
            if isinstance(values, list):
                choices = " | ".join(self.text(str(value)) for value in values)
                yield f"{name}: {self.text(before)} ({choices}) {self.text(self._after)}"
            elif is_text:
                rest = self.text(self._after.partition(self._value_end)[2])
                yield f"{name}: {self.text(before)} {name}_text {rest}"
                yield f"{name}_text[suffix={self.text(self._value_end)}]: /(?s:.*)/"
            else:
                inner = {**part, **_definitions(schema)} if isinstance(part, dict) else part
                yield f"{name}: {self.text(before)} {name}_json {self.text(self._after)}"
                yield f"{name}_json: {_json_rule(inner)}"


def _may_be_text(types: frozenset[str]) -> bool:
    """Whether a text between tags is a value of these types, whatever it is read as."""
    return not types or "string" in types


def _definitions(schema: JSONObject) -> JSONObject:
    return {key: schema[key] for key in DEFINITIONS if key in schema}


def _json_rule(schema: JSON) -> str:
    return f"%json {json.dumps(schema)}"
