"""Parses a tool call written as JSON, {"name": "f", "arguments": {...}}, character by character."""

import json

ARGUMENT_KEYS = ("arguments", "parameters")
KNOWN_KEYS = ("name", *ARGUMENT_KEYS, "id", "type")
SPACE = " \t\r\n"


class JsonScanner:
    """Finds the end of a JSON object, list or string, without validating it.

    done      the value is complete
    stopped   the next character cannot be part of it: a "<" outside of a string, which starts a
              marker
    """

    def __init__(self) -> None:
        self.done = self.stopped = False
        self._depth = 0
        self._quoted = self._escaped = False

    def feed(self, text: str, start: int = 0) -> int:
        """The number of characters from this position on that belong to the value."""
        for index in range(start, len(text)):
            char = text[index]
            if self._quoted:
                self._read_text(char)
            elif char == "<":
                self.stopped = True
                return index - start
            elif char == '"':
                self._quoted = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
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
        elif char == '"':
            self._quoted = False
            self.done = self._depth == 0


class JsonCallParser:
    """Parses one streamed call.

    strict    accept known keys only and require arguments; other JSON is content, not a call
    started   the name and the start of the arguments are known; `take` returns the arguments
    done      the object is complete
    invalid   this is not a call; if it was started, its arguments end here
    """

    def __init__(self, strict: bool = False) -> None:
        self.name = ""
        self.done = self.invalid = False
        self._strict = strict
        self._arguments_started = False
        self._arguments: list[str] = []  # not taken yet
        self._key = ""
        self._token: list[str] = []  # of a value
        self._value = JsonScanner()
        self._state = self._expect_object

    @property
    def started(self) -> bool:
        return bool(self.name) and self._arguments_started

    def feed(self, text: str, start: int = 0) -> int:
        """The number of characters consumed from this position on: all, unless the call becomes
        done or invalid before.
        """
        for index in range(start, len(text)):
            self._state(text[index])
            if self.invalid:
                return index - start
            if self.done:
                return index + 1 - start
        return len(text) - start

    def take(self) -> str:
        """The arguments parsed since the last call."""
        taken, self._arguments = self._arguments, []
        return "".join(taken)

    def _expect_object(self, char: str) -> None:
        if char == "{":
            self._state = self._expect_key
        elif char not in SPACE:
            self.invalid = True

    def _expect_key(self, char: str) -> None:
        if char == '"':
            self._start_value(char)
            self._state = self._read_key
        elif char == "}":
            self._end()
        elif char not in SPACE:
            self.invalid = True

    def _read_key(self, char: str) -> None:
        if self._continue_value(char):
            self._key = str(self._decoded())
            self._state = self._expect_colon
            self.invalid |= self._strict and self._key not in KNOWN_KEYS

    def _expect_colon(self, char: str) -> None:
        if char == ":":
            self._state = self._expect_value
        elif char not in SPACE:
            self.invalid = True

    def _expect_value(self, char: str) -> None:
        if char in SPACE:
            return
        self._start_value(char)
        if self._key in ARGUMENT_KEYS and char == "{" and not self._arguments_started:
            self._arguments = [char]
            self._arguments_started = True
            self._state = self._read_arguments
        elif char in '{["':
            self._state = self._read_value
        elif char.isalnum() or char == "-":
            self._state = self._read_scalar
        else:
            self.invalid = True

    def _read_arguments(self, char: str) -> None:
        self._value.feed(char)
        if self._value.stopped:
            self.invalid = True
            return
        self._arguments.append(char)
        if self._value.done:
            self._state = self._end_value

    def _read_value(self, char: str) -> None:
        if self._continue_value(char):
            self._assign()

    def _read_scalar(self, char: str) -> None:
        if char in SPACE or char in ",}":
            self._assign()
            if not self.invalid:
                self._end_value(char)
        else:
            self._token.append(char)

    def _end_value(self, char: str) -> None:
        if char == ",":
            self._state = self._expect_key
        elif char == "}":
            self._end()
        elif char not in SPACE:
            self.invalid = True

    def _start_value(self, char: str) -> None:
        self._token = [char]
        self._value = JsonScanner()
        self._value.feed(char)

    def _continue_value(self, char: str) -> bool:
        """Whether the value ends with this character."""
        self._value.feed(char)
        self.invalid = self._value.stopped
        self._token.append(char)
        return self._value.done

    def _assign(self) -> None:
        value = self._decoded()
        self._state = self._end_value
        if self._key == "name" and not self.started:
            self.name = value if isinstance(value, str) else ""
            self.invalid = not self.name
        elif self._key in ARGUMENT_KEYS and not self._arguments_started and value is not None:
            # Some models write the arguments as a string that contains JSON.
            if isinstance(value, str):
                self._arguments_started, self._arguments = True, [value or "{}"]
            else:
                self.invalid = True

    def _decoded(self) -> object:
        try:
            return json.loads("".join(self._token), strict=False)
        except (ValueError, RecursionError):
            self.invalid = True
            return None

    def _end(self) -> None:
        if not self.name or (self._strict and not self._arguments_started):
            self.invalid = True
            return
        if not self._arguments_started:
            self._arguments_started = True
            self._arguments = ["{}"]
        self.done = True
