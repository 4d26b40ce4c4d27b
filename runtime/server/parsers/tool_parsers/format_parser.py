"""Reads the calls of any ToolFormat from streamed text.

A call starts when its name and the beginning of its arguments are known. Text that deviates before
that point is content, unchanged. Arguments that deviate later end there: the client gets what the
model wrote.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from string import ascii_letters

from atomc.files.json_types import JSONObject
from atomc.runtime.server.parsers.tool_parsers.argument_values import (
    SPACES,
    ParameterTypes,
    UnquotedReader,
    is_text,
    json_text,
    keyword_arguments,
    string_part,
    value_of,
)
from atomc.runtime.server.parsers.tool_parsers.json_call import SPACE, JsonCallParser, JsonScanner
from atomc.runtime.server.parsers.tool_parsers.state_machine import ArgumentsStateMachine
from atomc.runtime.server.parsers.tool_parsers.tool_format import (
    CALL,
    KEY,
    KEYWORDS,
    LONGEST,
    NAME,
    OBJECT,
    PARAMETERS,
    UNQUOTED,
    Piece,
    Slot,
    ToolFormat,
    pieces,
    words,
)

# Between calls that begin with no word of the format, and what these begin with.
BETWEEN = f"[{SPACE},;]*"
NEXT = {CALL: ("{",), KEYWORDS: (*ascii_letters, "_")}


class FormatParser(ArgumentsStateMachine):
    """Parses the text of one choice.

    schemas   of the arguments, by function: which parameters without quotes are strings
    """

    def __init__(self, form: ToolFormat, schemas: Mapping[str, JSONObject] | None = None) -> None:
        self._form, self._schemas = form, schemas or {}
        self._begin, self._end = words(form.begin), words(form.end)
        before, _, after = form.parameter.partition("{value}")
        self._parameter, self._value_end = pieces(before), words(after)[:1]
        # What begins a parameter, and what ends them: the call, the calls, or the next call.
        ends = [*form.tail[-1:], *self._end[-1:], *self._begin[:1], *form.head[:1]]
        self._of_parameters = [
            word for word in (*self._parameter[:1], *ends) if isinstance(word, str)
        ]
        self._strips_newline = before.endswith("\n")
        # Words that begin calls, anywhere in a text.
        starts = [form.tag] if form.starts else [*self._begin[:1], *form.head[:1]]
        self._starts = [word for word in starts if isinstance(word, str) and word]
        self._call_ends = _apart([*form.tail[-1:], *self._end[-1:], *self._starts])
        self._ends = _apart([*self._end[-1:], *self._starts])
        super().__init__()
        if form.starts:
            self._state = self._read_start
        self._expected: deque[Piece] = deque()
        self._then: Callable[[], bool] = self._read_content
        self._slots: defaultdict[str, list[str]] = defaultdict(list)
        self._is_called = False  # the call that is read has started
        self._call = JsonCallParser()
        self._name = ""
        self._types: dict[str, ParameterTypes] = {}

    @property
    def markers(self) -> tuple[str, ...]:
        return self._form.markers

    # content

    def _finish_content(self, rest: str) -> None:
        if not self._is_called and self._state != self._after_call:
            super()._finish_content(rest)

    def _read_start(self) -> bool:
        """At the start of a message that may begin with calls."""
        if not self._skip_space() or self._text.is_prefix_of(self._form.tag):
            return False
        if self._text.startswith(self._form.tag):
            self._raw.append(self._text.take(len(self._form.tag)))
        self._expect(self._begin, self._next_call)
        return True

    def _read_content(self) -> bool:
        self._is_called = False
        text, marker = self._text.take_until(*self._starts)
        self._deltas.content(text)
        if marker:
            self._start(marker)
        return bool(marker)

    def _start(self, marker: str) -> None:
        """This word was read, with which calls begin."""
        self._is_called, self._raw = False, [marker]
        if marker == self._form.tag:
            self._expect(self._begin, self._next_call)
        elif [marker] == self._begin[:1]:
            self._expect(self._begin[1:], self._next_call)
        else:
            self._read_head(self._form.head[1:])

    def _fail(self) -> None:
        """What comes next is not what the format has there."""
        if self._is_called:
            self._state = self._read_parameters
        else:
            self._content(self._read_content)

    # what the format has there

    def _expect(self, expected: Sequence[Piece], then: Callable[[], bool]) -> None:
        self._expected, self._then, self._state = deque(expected), then, self._read_pieces
        self._slots.clear()

    def _read_pieces(self) -> bool:
        if not self._expected:
            self._state = self._then
            return True
        piece = self._expected[0]
        if isinstance(piece, Slot):
            return self._read_slot(piece.name)
        if not self._skip_space() or self._text.is_prefix_of(piece):
            return False
        if self._text.startswith(piece):
            self._raw.append(self._text.take(len(piece)))
            self._expected.popleft()
        elif piece in self._form.optional:
            self._expected.popleft()
        else:
            self._fail()
        return True

    def _read_slot(self, name: str) -> bool:
        room = LONGEST - sum(map(len, self._slots[name]))
        part = self._text.take_characters(f"{KEY if name == 'key' else NAME}{{0,{room}}}")
        self._slots[name].append(part)
        self._raw.append(part)
        if self._text:
            self._expected.popleft()
        return bool(self._text)

    def _skip_space(self) -> bool:
        """Returns whether more text is there."""
        self._raw.append(self._text.take_characters(SPACES))
        return bool(self._text)

    def _slot(self, name: str) -> str:
        return "".join(self._slots[name]).strip()

    # calls

    def _next_call(self) -> bool:
        """Where a call may be."""
        if self._form.arguments == CALL:
            self._call = JsonCallParser(self._form.starts, self._form.keys[0])
            self._state = self._read_call
        else:
            self._read_head(self._form.head)
        return True

    def _read_call(self) -> bool:
        """A JSON object with its name and arguments."""
        call = self._call
        self._raw.append(self._text.take_read(call.feed))
        if call.started:
            if not self._is_called:
                self._deltas.call(call.name)
            self._is_called, self._raw = True, []
            self._deltas.arguments(call.take())
            return self._ended(call.done or call.invalid)
        if call.invalid:
            self._fail()
        return call.invalid

    def _read_head(self, head: Sequence[Piece]) -> None:
        state = {
            OBJECT: self._begin_object,
            PARAMETERS: self._begin_parameters,
            KEYWORDS: self._begin_keywords,
            UNQUOTED: self._begin_unquoted,
        }[self._form.arguments]
        self._expect(head, state)

    def _called(self) -> bool:
        """Start the call, unless it has no name."""
        name = self._form.name_in(self._slot("name"))
        if name:
            self._deltas.call(name)
            self._is_called, self._raw = True, []
            self._name = name
        else:
            self._fail()
        return bool(name)

    def _end_call(self) -> bool:
        """After the arguments: the rest of the call, without what does not belong to it."""
        if not self._form.tail:
            self._state = self._after_call
            return True
        _, marker = self._text.take_until(*self._call_ends)
        if marker:
            self._after(marker)
        return bool(marker)

    def _after(self, marker: str) -> None:
        """This word was read, which ends a call, or calls, or begins the next one."""
        if marker in self._starts:
            self._start(marker)
        else:
            is_tail = [marker] == self._form.tail[-1:]
            self._state = self._after_call if is_tail else self._read_content

    def _after_call(self) -> bool:
        """Up to the end of the calls, or to the next one."""
        self._is_called, self._raw = False, []
        is_marked = isinstance(next(iter(self._form.head), None), str)
        if not self._end and is_marked:
            self._state = self._read_content  # which sees the next call
            return True
        if not self._form.apart and not is_marked:
            self._text.take_characters(BETWEEN)
            if not self._text:
                return False
            if self._text.startswith(*NEXT[self._form.arguments]):
                return self._next_call()
        if not self._end:
            self._state = self._read_content
            return True
        _, marker = self._text.take_until(*self._ends)
        if marker:
            self._after(marker)
        return bool(marker)

    # arguments

    def _begin_object(self) -> bool:
        return self._begin_braced(self._read_arguments)

    def _begin_unquoted(self) -> bool:
        return self._begin_braced(self._read_unquoted)

    def _begin_braced(self, state: Callable[[], bool]) -> bool:
        if not self._skip_space() or self._text.is_prefix_of(*self._form.tail[:1]):
            return False
        if self._text.startswith("{"):
            if self._called():
                self._arguments, self._unquoted = JsonScanner(), UnquotedReader(self._form.quote)
                self._state = state
        elif self._text.startswith(*self._form.tail[:1]):
            if self._called():
                self._deltas.arguments("{}")
                self._state = self._end_call
        else:
            self._fail()
        return True

    def _read_unquoted(self) -> bool:
        self._deltas.arguments(self._unquoted.read(self._text))
        return self._ended(self._unquoted.done or self._unquoted.invalid)

    def _ended(self, ended: bool) -> bool:
        if ended:
            self._state = self._end_call
        return ended

    def _begin_keywords(self) -> bool:
        self._arguments, self._keywords = JsonScanner("([{", ")]}", "\"'", depth=1), list[str]()
        self._state = self._read_keywords
        return True

    def _read_keywords(self) -> bool:
        """All of them: Python's literals are JSON only when they are complete."""
        part = self._text.take_read(self._arguments.feed)
        self._keywords.append(part)
        self._raw.append(part)
        if self._arguments.stopped:
            self._fail()
        elif self._arguments.done:
            try:
                arguments = json_text(keyword_arguments("".join(self._keywords)[:-1]))
            except ValueError:
                self._fail()
            else:
                if self._called():
                    self._deltas.arguments(arguments)
                    self._state = self._after_call
        return self._arguments.stopped or self._arguments.done

    def _begin_parameters(self) -> bool:
        """Where the first parameter may begin, or the end of the call."""
        if not self._skip_space() or self._text.is_prefix_of(*self._of_parameters):
            return False
        if not self._text.startswith(*self._of_parameters):
            self._fail()
        elif self._called():
            self._separator, self._state = "{", self._read_parameters
        return True

    def _read_parameters(self) -> bool:
        """Up to the next parameter, or to the end of the call; drops what stands before it."""
        _, marker = self._text.take_until(*self._of_parameters)
        if marker == self._of_parameters[0]:
            self._expect(self._parameter[1:], self._read_value)
        elif marker:
            self._deltas.arguments("{}" if self._separator == "{" else "}")
            self._after(marker)
        return bool(marker)

    def _read_value(self) -> bool:
        """The start of a value."""
        key, is_string = self._slot("key"), self._slot("is_string")
        if self._name not in self._types:
            self._types[self._name] = ParameterTypes(self._schemas.get(self._name, {}))
        types = self._types[self._name].of(key)
        self._kinds = frozenset() if is_string == "false" else types
        self._deltas.arguments(f"{self._separator}{json_text(key)}: ")
        self._separator = ", "
        self._value, self._newline = list[str](), ""
        if self._strips_newline and self._text.startswith("\n"):
            self._text.take(1)
        is_container = self._kinds & {"object", "array"} and "string" not in self._kinds
        self._state = self._read_start_of_value if is_container else self._read_rest_of_value
        if is_string == "true" or is_text(self._kinds):
            self._deltas.arguments('"')
            self._state = self._read_rest_of_text
        return True

    def _read_rest_of_text(self) -> bool:
        text, marker = self._text.take_until(*self._value_end)
        text = self._newline + text
        self._newline = "\n" if self._strips_newline and text.endswith("\n") else ""
        self._deltas.arguments(string_part(text.removesuffix(self._newline)))
        if marker:
            self._deltas.arguments('"')
            self._state = self._read_parameters
        return bool(marker)

    def _read_container(self) -> bool:
        """An object or a list, whose strings may have what ends a value."""
        self._value.append(self._text.take_read(self._arguments.feed))
        if self._arguments.done or self._arguments.stopped:
            self._state = self._read_rest_of_value
        return self._state == self._read_rest_of_value

    def _read_start_of_value(self) -> bool:
        self._text.take_characters(SPACES)
        if self._text.startswith("{", "["):
            self._arguments = JsonScanner(quotes="\"'")
            self._state = self._read_container
        elif self._text:
            self._state = self._read_rest_of_value
        return bool(self._text)

    def _read_rest_of_value(self) -> bool:
        text, marker = self._text.take_until(*self._value_end)
        self._value.append(text)
        if marker:
            value = "".join(self._value)
            if self._strips_newline:
                value = value.removesuffix("\n")
            self._deltas.arguments(json_text(value_of(value, self._kinds)))
            self._state = self._read_parameters
        return bool(marker)


def _apart(markers: Sequence[str]) -> list[str]:
    """The markers without those that contain another one."""
    texts = list(dict.fromkeys(markers))
    return [text for text in texts if not any(other in text for other in texts if other != text)]
