"""Arguments that are not written as JSON: their values, and their text as JSON."""

import ast
import json
import math
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from atomc.files.json_types import JSON, JSONObject
from atomc.runtime.constrained.closed_schema import ALTERNATIVES, References, as_list, walk
from atomc.runtime.server.parsers.text_buffer import TextBuffer
from atomc.runtime.server.parsers.tool_parsers.json_call import SPACE, is_unicode

SPACES = f"[{SPACE}]*"
# In the order in which a text is tried as a value of them.
KINDS = ("null", "boolean", "integer", "number", "object", "array")
NULLS, TRUE, FALSE = ("null", "None"), ("true", "True"), ("false", "False")
NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?")


def json_text(value: JSON) -> str:
    """The value as JSON, with escapes where it has lone surrogates, which no answer can carry.
    Raises ValueError for infinite numbers and NaN.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return text if is_unicode(text) else json.dumps(value, allow_nan=False)


def string_part(text: str) -> str:
    """A part of a JSON string, without its quotes."""
    return json_text(text)[1:-1]


class ParameterTypes:
    """The JSON types of the parameters of a function, by the schema of its arguments."""

    def __init__(self, schema: JSONObject) -> None:
        self._schema = schema
        self._references = References(schema, list(walk(schema)))

    def of(self, key: str) -> frozenset[str]:
        """The types that this parameter may have; none if the schema does not say."""
        properties = self._schema.get("properties")
        return frozenset(self._types(properties.get(key) if isinstance(properties, dict) else None))

    def _types(self, schema: JSON) -> Iterator[str]:
        waiting, seen = [schema], set[int]()
        while waiting:
            node = waiting.pop()
            if not isinstance(node, dict) or id(node) in seen:
                continue
            seen.add(id(node))
            kind = node.get("type")
            values = [*as_list(node.get("enum")), *([node["const"]] if "const" in node else [])]
            if kind is not None:
                yield from (name for name in [kind, *as_list(kind)] if isinstance(name, str))
            else:
                yield from map(_type_of, values)
            for name in ("allOf", *ALTERNATIVES):
                waiting += as_list(node.get(name))
            waiting.append(self._references.target(node.get("$ref")))


def _type_of(value: JSON) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int() | float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
    return "object"


def is_text(types: frozenset[str]) -> bool:
    """Whether a parameter of these types is a string, whatever stands there."""
    return types == {"string"}


def value_of(text: str, types: frozenset[str]) -> JSON:
    """The value of a parameter without quotes: of the first of its types that it can be, as JSON or
    as Python writes it; a string if it can be of none. Without types, what it is as JSON.
    """
    stripped = text.strip()
    for kind in KINDS:
        if kind in types or not types:
            with suppress(ValueError, SyntaxError, RecursionError, MemoryError):
                return _read(stripped, kind, python=bool(types))
    return text


def _read(text: str, kind: str, python: bool) -> JSON:
    """Raises ValueError and others if it is not of this type."""
    values: dict[str, JSON] = {}
    if kind == "null":
        values = dict.fromkeys(NULLS if python else NULLS[:1])
    elif kind == "boolean":
        values = dict.fromkeys(TRUE if python else TRUE[:1], True)
        values |= dict.fromkeys(FALSE if python else FALSE[:1], False)
    elif kind in ("integer", "number"):
        if NUMBER.fullmatch(text):
            number = float(text) if set(text) & set(".eE") else int(text)
            if not math.isfinite(number):
                raise ValueError
            if kind == "number" or number == int(number):
                return number if kind == "number" else int(number)
    else:
        return _container(text, dict if kind == "object" else list, python)
    if text not in values:
        raise ValueError
    return values[text]


def _container(text: str, kind: type, python: bool) -> JSON:
    if text[:1] not in ("{", "["):
        raise ValueError
    try:
        value: JSON = json.loads(text, strict=False)
    except ValueError:
        if not python:
            raise
        value = literal(ast.parse(text, mode="eval").body)
    if not isinstance(value, kind):
        raise ValueError
    json_text(value)  # NaN and others have no text
    return value


def keyword_arguments(text: str) -> JSONObject:
    """Of a call in Python, the text between its parentheses. Raises ValueError if they are not
    literals with names.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of unknown escapes
        try:
            call = ast.parse(f"f({text})", mode="eval").body
        except (SyntaxError, RecursionError, MemoryError) as error:
            raise ValueError(f"not arguments in Python: {error}") from error
    if not isinstance(call, ast.Call) or call.args:
        raise ValueError("not arguments with names")
    return {_name_of(keyword): literal(keyword.value) for keyword in call.keywords}


def _name_of(keyword: ast.keyword) -> str:
    if keyword.arg is None:
        raise ValueError("not arguments with names")
    return keyword.arg


def literal(node: ast.expr) -> Any:
    """The value as JSON of a literal in Python. Raises ValueError if it is none."""
    match node:
        case ast.Constant(value=None | bool() | int() | float() | str() as value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.Name(id="true" | "false" | "null" as word):
            return json.loads(word)
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [literal(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            pairs = zip(keys, values, strict=True)
            return {_key_of(key): literal(value) for key, value in pairs}
    raise ValueError(f"not a literal: {ast.dump(node)[:80]}")


def _key_of(node: ast.expr | None) -> str:
    if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
        raise ValueError("a key is no string")
    return node.value


class UnquotedReader:
    """Reads an object with bare keys and quotes of its own from a buffer that has its brace:
    {city:"Paris",days:[1,2]}.

    done     it is complete
    invalid  what is next is not a part of it
    """

    def __init__(self, quote: str) -> None:
        self.done = self.invalid = False
        self._quote = quote
        self._open: list[str] = []  # the brackets that close what is open
        self._scalar: list[str] = []
        self._state: Callable[[TextBuffer, list[str]], bool] = self._read_value

    def read(self, text: TextBuffer) -> str:
        """The JSON text of what the buffer has; takes it."""
        written = list[str]()
        while text and not self.done and not self.invalid and self._state(text, written):
            pass
        return "".join(written)

    def _read_value(self, text: TextBuffer, written: list[str]) -> bool:
        text.take_characters(SPACES)
        if text.is_prefix_of(self._quote):  # also if nothing is left
            return False
        if text.startswith(self._quote):
            text.take(len(self._quote))
            written.append('"')
            self._state = self._read_string
        elif text.startswith("{", "["):
            bracket = text.take(1)
            self._open.append("}" if bracket == "{" else "]")
            written.append(bracket)
            self._state = self._read_first
        elif not self._open:
            self.invalid = True
        else:
            self._scalar = []
            self._state = self._read_scalar
        return True

    def _read_first(self, text: TextBuffer, written: list[str]) -> bool:
        """After an opening bracket."""
        text.take_characters(SPACES)
        if text.startswith(self._open[-1]):
            self._state = self._read_end
        elif text:
            self._state = self._next()
        return bool(text)

    def _next(self) -> Callable[[TextBuffer, list[str]], bool]:
        self._scalar = []
        return self._read_key if self._open[-1] == "}" else self._read_value

    def _read_key(self, text: TextBuffer, written: list[str]) -> bool:
        self._scalar.append(text.take_characters(r"[^:<>{}\[\],]*"))
        if text.startswith(":"):
            text.take(1)
            written.append(f"{json_text(''.join(self._scalar).strip())}:")
            self._state = self._read_value
        elif text:
            self.invalid = True
        return bool(text)

    def _read_scalar(self, text: TextBuffer, written: list[str]) -> bool:
        self._scalar.append(text.take_characters(r"[^<>{}\[\],]*"))
        if text:
            value = value_of("".join(self._scalar).strip(), frozenset())
            written.append(json_text(value))
            self._state = self._read_end
        return bool(text)

    def _read_string(self, text: TextBuffer, written: list[str]) -> bool:
        part, marker = text.take_until(self._quote)
        written.append(string_part(part))
        if marker:
            written.append('"')
            self._state = self._read_end
        return bool(marker)

    def _read_end(self, text: TextBuffer, written: list[str]) -> bool:
        """After a value."""
        text.take_characters(SPACES)
        if text.startswith(","):
            written.append(text.take(1))
            self._state = self._next()
        elif text.startswith(self._open[-1]):
            written.append(text.take(1))
            self._open.pop()
            self.done = not self._open
        elif text:
            self.invalid = True
        return bool(text)
