"""A call written as JSON, {"name": "f", "arguments": {...}}, read character by character."""

import json

ARGUMENTS = ("arguments", "parameters")
KNOWN = ("name", *ARGUMENTS, "id", "type")
SPACE = " \t\r\n"


class JsonScanner:
    """Where a JSON object, list or text ends; what it holds is not judged.

    done     it has ended
    stopped  the next character cannot be part of it: "<" outside of a text, with which markers begin
    """

    def __init__(self) -> None:
        self.done = self.stopped = False
        self._depth = 0
        self._quoted = self._escaped = False

    def feed(self, text: str) -> int:
        """The number of characters that belong to it."""
        for at, char in enumerate(text):
            if self._quoted:
                self._in_text(char)
            elif char == "<":
                self.stopped = True
                return at
            elif char == '"':
                self._quoted = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                self.done = self._depth <= 0
            if self.done:
                return at + 1
        return len(text)

    def _in_text(self, char: str) -> None:
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            self._quoted = False
            self.done = self._depth == 0


class JsonCallParser:
    """One call as it streams.

    strict   no keys but the known ones, and arguments must be there: what else is JSON is an answer, not a call
    started  name and the beginning of the arguments are known, `take` gives the arguments
    done     the object has ended
    broken   the next character, or what came, makes it no call; if it was started, its arguments end here
    """

    def __init__(self, strict: bool = False) -> None:
        self.name = ""
        self.done = self.broken = False
        self._strict = strict
        self._begun = False
        self._arguments = ""  # not taken yet
        self._key = self._token = ""
        self._value = JsonScanner()
        self._state = self._open

    @property
    def started(self) -> bool:
        return bool(self.name) and self._begun

    def feed(self, text: str) -> int:
        """The number of characters that were read: all, unless it is done or broken before."""
        for at, char in enumerate(text):
            self._state(char)
            if self.broken:
                return at
            if self.done:
                return at + 1
        return len(text)

    def take(self) -> str:
        """The arguments that have come since the last time."""
        taken, self._arguments = self._arguments, ""
        return taken

    def _open(self, char: str) -> None:
        if char == "{":
            self._state = self._before_key
        elif char not in SPACE:
            self.broken = True

    def _before_key(self, char: str) -> None:
        if char == '"':
            self._begin(char)
            self._state = self._in_key
        elif char == "}":
            self._end()
        elif char not in SPACE:
            self.broken = True

    def _in_key(self, char: str) -> None:
        if self._more(char):
            self._key = str(self._decoded())
            self._state = self._colon
            self.broken |= self._strict and self._key not in KNOWN

    def _colon(self, char: str) -> None:
        if char == ":":
            self._state = self._before_value
        elif char not in SPACE:
            self.broken = True

    def _before_value(self, char: str) -> None:
        if char in SPACE:
            return
        self._begin(char)
        if self._key in ARGUMENTS and char == "{" and not self._begun:
            self._arguments = char
            self._begun = True
            self._state = self._in_arguments
        elif char in '{["':
            self._state = self._in_value
        elif char.isalnum() or char == "-":
            self._state = self._in_scalar
        else:
            self.broken = True

    def _in_arguments(self, char: str) -> None:
        self._value.feed(char)
        if self._value.stopped:
            self.broken = True
            return
        self._arguments += char
        if self._value.done:
            self._state = self._after_value

    def _in_value(self, char: str) -> None:
        if self._more(char):
            self._assign()

    def _in_scalar(self, char: str) -> None:
        if char in SPACE or char in ",}":
            self._assign()
            if not self.broken:
                self._after_value(char)
        else:
            self._token += char

    def _after_value(self, char: str) -> None:
        if char == ",":
            self._state = self._before_key
        elif char == "}":
            self._end()
        elif char not in SPACE:
            self.broken = True

    def _begin(self, char: str) -> None:
        self._token = char
        self._value = JsonScanner()
        self._value.feed(char)

    def _more(self, char: str) -> bool:
        """Whether the text or list that is read ends with this character."""
        self._value.feed(char)
        self.broken = self._value.stopped
        self._token += char
        return self._value.done

    def _assign(self) -> None:
        value = self._decoded()
        self._state = self._after_value
        if self._key == "name" and not self.started:
            self.name = value if isinstance(value, str) else ""
            self.broken = not self.name
        elif self._key in ARGUMENTS and not self._begun and value is not None:
            # Some models write the arguments as a text that holds JSON.
            if isinstance(value, str):
                self._begun, self._arguments = True, value or "{}"
            else:
                self.broken = True

    def _decoded(self) -> object:
        try:
            return json.loads(self._token, strict=False)
        except (ValueError, RecursionError):
            self.broken = True
            return None

    def _end(self) -> None:
        if not self.name or (self._strict and not self._begun):
            self.broken = True
            return
        if not self._begun:
            self._begun = True
            self._arguments = "{}"
        self.done = True
