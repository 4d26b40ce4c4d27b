"""Parses a tool call written as JSON, {"name": "f", "arguments": {...}}, character by character."""

import json
from collections.abc import Generator, Sequence
from typing import Any, TypeAlias, TypeVar

ARGUMENT_KEYS = ("arguments", "parameters")
OTHER_KEYS = (*ARGUMENT_KEYS, "id", "type")
SPACE = " \t\r\n"


class JsonScanner:
    """Finds the end of a JSON object, list or string, without validating it; with other brackets
    and quotes, of what is written with these.

    depth     how many brackets are open before the text
    done      the value is complete
    stopped   the next character cannot be part of it: a "<" outside of a string, which starts a
              marker
    """

    def __init__(
        self, opening: str = "{[", closing: str = "}]", quotes: str = '"', depth: int = 0
    ) -> None:
        self.done = self.stopped = False
        self._opening, self._closing, self._quotes, self._depth = opening, closing, quotes, depth
        self._quote = ""  # of the string that is open
        self._escaped = False

    def feed(self, text: str, start: int = 0) -> int:
        """The number of characters from this position on that belong to the value."""
        for index in range(start, len(text)):
            char = text[index]
            if self._quote:
                self._read_text(char)
            elif char == "<":
                self.stopped = True
                return index - start
            elif char in self._quotes:
                self._quote = char
            elif char in self._opening:
                self._depth += 1
            elif char in self._closing:
                self._depth -= 1
                self.done = self._depth <= 0
            if self.done:
                return index + 1 - start
        return len(text) - start

    def _read_text(self, char: str) -> None:
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == self._quote:
            self._quote = ""
            self.done = self._depth == 0


class JsonCallParser:
    """Parses one streamed call.

    name_key  of the function's name
    strict    accept known keys only and require arguments; other JSON is content, not a call
    started   the name and the start of the arguments are known; `take` returns the arguments
    done      the object is complete
    invalid   this is not a call; if it was started, its arguments end here
    """

    def __init__(self, strict: bool = False, name_key: str = "name") -> None:
        self.name = ""
        self.done = self.invalid = False
        self._strict, self._name_key = strict, name_key
        self._arguments_started = False
        self._arguments: list[str] = []  # not taken yet
        self._reader = self._read()
        next(self._reader)

    @property
    def started(self) -> bool:
        return bool(self.name) and self._arguments_started

    def feed(self, text: str, start: int = 0) -> int:
        """The number of characters consumed from this position on: all, unless the call becomes
        done or invalid before.
        """
        for index in range(start, len(text)):
            try:
                self._reader.send(text[index])
            except StopIteration:
                self.done = True
                return index + 1 - start
            except (ValueError, RecursionError):
                self.invalid = True
                return index - start
        return len(text) - start

    def take(self) -> str:
        """The arguments parsed since the last call."""
        taken = "".join(self._arguments)
        self._arguments.clear()
        return taken

    def _read(self) -> "Reader[None]":
        """Reads the object. Raises ValueError or RecursionError if it is not a call."""
        _expect((yield from _read_visible()) == "{")
        char = yield from _read_visible()
        while char != "}":
            _expect(char == '"')
            key = _decoded((yield from _read_value([char])))
            _expect(key in (self._name_key, *OTHER_KEYS) or not self._strict)
            _expect((yield from _read_visible()) == ":")
            char = yield from _read_visible()
            if key in ARGUMENT_KEYS and char == "{" and not self._arguments_started:
                self._start_arguments(char)
                yield from _read_value(self._arguments)
                char = yield from _read_visible()
            elif char in '{["':
                self._assign(key, _decoded((yield from _read_value([char]))))
                char = yield from _read_visible()
            else:
                scalar, char = yield from _read_scalar(char)
                self._assign(key, _decoded(scalar))
                if char in SPACE:
                    char = yield from _read_visible()
            _expect(char in ",}")
            if char == ",":
                char = yield from _read_visible()
        _expect(bool(self.name) and (self._arguments_started or not self._strict))
        if not self._arguments_started:
            self._start_arguments("{}")

    def _start_arguments(self, text: str) -> None:
        self._arguments_started, self._arguments = True, [text]

    def _assign(self, key: Any, value: Any) -> None:
        if key == self._name_key and not self.started:
            self.name = value if isinstance(value, str) and is_unicode(value) else ""
            _expect(bool(self.name))
        elif key in ARGUMENT_KEYS and not self._arguments_started and value is not None:
            # Some models write the arguments as a string that contains JSON.
            _expect(isinstance(value, str))
            self._start_arguments(value or "{}")


# Parts of a text that gets its characters by `send`.
T = TypeVar("T")
Reader: TypeAlias = Generator[None, str, T]


def _read_visible() -> Reader[str]:
    """The next character that is not white space."""
    while (char := (yield)) in SPACE:
        pass
    return char


def _read_value(text: list[str]) -> Reader[list[str]]:
    """The list, to which the rest of the object, list or string is appended that begins there."""
    value = JsonScanner()
    value.feed(text[0])
    while not value.done:
        char = yield
        value.feed(char)
        _expect(not value.stopped)
        text.append(char)
    return text


def _read_scalar(char: str) -> Reader[tuple[list[str], str]]:
    """The number or word that begins with this character, and the character after it."""
    _expect(char.isalnum() or char == "-")
    text = [char]
    while (char := (yield)) not in SPACE and char not in ",}":
        text.append(char)
    return text, char


def is_unicode(text: str) -> bool:
    """Whether a text has no lone surrogates, which escapes in JSON and Python can write."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _decoded(text: Sequence[str]) -> Any:
    return json.loads("".join(text), strict=False)


def _expect(holds: bool) -> None:
    if not holds:
        raise ValueError
