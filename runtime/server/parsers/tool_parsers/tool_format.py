"""How models write tool calls, as data: one description is read (format_parser.py), written by
`ToolFormat.written`, and detected in a chat template.

A text has slots in braces: {name} of the function, one of ARGUMENTS, and in parameters {key},
{value} and {is_string}. White space between its other pieces may be another one, or missing.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from atomc.files.json_types import JSON, JSONLike

CALL = "call"  # a JSON object of name and arguments
OBJECT = "object"  # a JSON object
PARAMETERS = "parameters"  # parameters, one after another
KEYWORDS = "keywords"  # keyword arguments in Python
UNQUOTED = "unquoted"  # a JSON object with bare keys, and quotes of its own around strings
ARGUMENTS = (CALL, OBJECT, PARAMETERS, KEYWORDS, UNQUOTED)
# What stands in a slot: at most LONGEST of these characters.
NAME, KEY, LONGEST = r"[\w.:/-]", r"[^<>\"\n]", 256
PIECE = re.compile(r"\{(\w+)\}|<[^<>{}\s]*>?|\[[A-Z_]+\]|[^<\s{}\[]+|[\[{}]")


class Slot(NamedTuple):
    """What differs from call to call."""

    name: str


Piece = str | Slot
Call = tuple[str, Mapping[str, JSON]]  # name and arguments


def pieces(text: str) -> list[Piece]:
    """The slots of a text, and the words and tags between them."""
    return [Slot(match[1]) if match[1] else match[0] for match in PIECE.finditer(text)]


@dataclass(frozen=True)
class ToolFormat:
    """The format of a family of models.

    source      where it is documented
    seen_in     words of the chat templates of these models: all of one of the tuples
    call        the text of a call
    parameter   the text of one of the PARAMETERS
    begin, end  around all calls, or around each one if `apart`
    between     two calls
    starts      calls are at the start of the message only, but for those after `tag`
    tag         a text that may stand before the calls
    keys        of name and arguments in a CALL
    extra       further keys of a CALL, before these
    quote       around strings in UNQUOTED
    named       what stands for {name}: a text with {name} and {index}, the number of the call
    optional    pieces of the call that may be missing
    """

    source: str
    seen_in: tuple[tuple[str, ...], ...]
    call: str
    parameter: str = ""
    begin: str = ""
    between: str = ""
    end: str = ""
    apart: bool = False
    starts: bool = False
    tag: str = ""
    keys: tuple[str, str] = ("name", "arguments")
    extra: tuple[str, ...] = ()
    quote: str = '"'
    named: str = "{name}"
    optional: tuple[str, ...] = ()

    @cached_property
    def arguments(self) -> str:
        """The kind of ARGUMENTS."""
        return next(slot for slot in self._slots(self.call) if slot in ARGUMENTS)

    @cached_property
    def head(self) -> list[Piece]:
        """The pieces of a call before its arguments."""
        return pieces(self.call.partition(f"{{{self.arguments}}}")[0])

    @cached_property
    def tail(self) -> list[str]:
        """The pieces of a call after its arguments."""
        return words(self.call.partition(f"{{{self.arguments}}}")[2])

    @cached_property
    def markers(self) -> tuple[str, ...]:
        """The words and tags of the format."""
        texts = (self.tag, self.begin, self.call, self.parameter, self.end, self.named, self.quote)
        return tuple(dict.fromkeys(word for text in texts for word in words(text)))

    def name_in(self, text: str) -> str:
        """The name of the function in what stands for it."""
        before, _, after = self.named.partition("{name}")
        pattern = re.escape(after).replace(re.escape("{index}"), r"\d+")
        return re.sub(f"{pattern}$", "", text.removeprefix(before)) if after else text

    def is_readable(self, name: str) -> bool:
        """Whether a parser reads this name of a function as it was written."""
        stands = self.named.format(name=name, index=0)
        is_slot = re.fullmatch(f"{NAME}{{1,{LONGEST}}}", stands) is not None
        return self.arguments == CALL or (is_slot and self.name_in(stands) == name)

    def is_seen_in(self, chat_template: str) -> bool:
        return any(all(word in chat_template for word in texts) for texts in self.seen_in)

    def written(self, calls: Sequence[Call]) -> str:
        """The calls, as the chat templates of these models write them."""
        texts = [self._written(index, *call) for index, call in enumerate(calls)]
        if self.apart:
            return self.between.join(f"{self.begin}{text}{self.end}" for text in texts)
        return f"{self.begin}{self.between.join(texts)}{self.end}"

    def _written(self, index: int, name: str, arguments: Mapping[str, JSON]) -> str:
        write = {
            CALL: self._object_of_call,
            OBJECT: lambda *_: _json(arguments),
            PARAMETERS: lambda *_: "".join(self._parameter(*item) for item in arguments.items()),
            KEYWORDS: lambda *_: ", ".join(f"{key}={value!r}" for key, value in arguments.items()),
            UNQUOTED: lambda *_: _unquoted(dict(arguments), self.quote),
        }[self.arguments]
        values = {
            "name": self.named.format(name=name, index=index),
            "id": f"{index:09}",
            self.arguments: write(index, name, arguments),
        }
        return _filled(self.call, values)

    def _object_of_call(self, index: int, name: str, arguments: Mapping[str, JSON]) -> str:
        extra = {key: str(index) for key in self.extra}
        return _json({**extra, self.keys[0]: name, self.keys[1]: dict(arguments)})

    def _parameter(self, key: str, value: JSON) -> str:
        is_string = isinstance(value, str)
        text = value if isinstance(value, str) else _json(value)
        return _filled(
            self.parameter, {"key": key, "value": text, "is_string": str(is_string).lower()}
        )

    @staticmethod
    def _slots(text: str) -> list[str]:
        return [piece.name for piece in pieces(text) if isinstance(piece, Slot)]


def words(text: str) -> list[str]:
    """The pieces of a text that are no slots."""
    return [piece for piece in pieces(text) if isinstance(piece, str)]


def _filled(text: str, values: Mapping[str, str]) -> str:
    return re.sub(r"\{(\w+)\}", lambda slot: values[slot[1]], text)


def _json(value: JSONLike) -> str:
    return json.dumps(value, ensure_ascii=False)


def _unquoted(value: JSON, quote: str) -> str:
    match value:
        case str():
            return f"{quote}{value}{quote}"
        case list():
            return f"[{','.join(_unquoted(item, quote) for item in value)}]"
        case dict():
            items = (f"{key}:{_unquoted(item, quote)}" for key, item in value.items())
            return f"{{{','.join(items)}}}"
    return _json(value)
