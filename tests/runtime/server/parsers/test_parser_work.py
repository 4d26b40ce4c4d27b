"""The work of parsers of the model's text is linear in it, whatever the model writes."""

import re
from types import SimpleNamespace

import pytest

pytest.importorskip("fastapi")

from atomc.runtime.server.parsers import text_buffer
from atomc.runtime.server.parsers.message_deltas import merge_deltas
from atomc.runtime.server.parsers.output_parser import OutputParser
from atomc.runtime.server.parsers.reasoning_parsers import reasoning_parser
from atomc.runtime.server.parsers.tool_parsers import tool_parser
from atomc.runtime.server.parsers.tool_parsers.formats import FORMATS as TOOL_FORMATS

# Pieces of one character take most of the time.
LENGTHS = {1: 400, 4000: 4000}
# Characters read or copied, for each one of the text: above the length of any marker, and well below
# half of the text, which a quadratic parser needs.
MOST = 40
JSON = ["{", "}", "[", '"', ",", ":", "\\", "1"]
REPEATED = [" ", "\n", "\t", "\u3000", "x", "<", ";"]
HARMONY_CALL = "<|channel|>commentary to=functions.f<|message|>"


def states(form):
    """Texts that lead to each state of a format's parser, and texts that are repeated there."""
    call, calls = ("f", {"a": "x", "b": [1]}), form.written([("f", {"a": "x", "b": [1]})] * 2)
    ends = {calls.find(word) + len(word) for word in (*form.markers, "f", "x", "b", "1")}
    return [calls[:end] for end in sorted(ends)] + [calls], [*form.markers, form.written([call])]


# (texts that lead to each state, texts that are repeated there)
FORMATS = {
    **{name: states(form) for name, form in TOOL_FORMATS.items()},
    "gpt-oss": (
        ["<|channel|>", "<|start|>", HARMONY_CALL, HARMONY_CALL + '{"a": "', HARMONY_CALL + "{}",
         "<|channel|>analysis<|message|>", "<|channel|>final<|message|>", "<|start|>x<|end|>"],
        ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|start|>x<|message|>y<|end|>",
         f"<|start|>{HARMONY_CALL}{{}}<|call|>", "<|start|><|channel|>analysis<|message|>y", "to=", " to=functions.f"],
    ),
    "think": (["<think>", "<think>x", "<think>x</think>", "y"], ["<think>", "</think>", "\n\n", "x\n"]),
}  # fmt: skip


def parsers(name):
    """The parser of a format, or the pair of them that a response has."""
    if name == "think":
        return OutputParser(reasoning_parser(name), tool_parser("hermes"))
    return OutputParser(reasoning_parser(name) if name == "gpt-oss" else None, tool_parser(name))


class Counted(str):
    """A text that counts the characters that are read from it or copied, as do its parts."""

    count = 0

    def __getitem__(self, index):
        return counted(super().__getitem__(index))

    def __iter__(self):
        return map(counted, super().__iter__())

    def __add__(self, other):
        return counted(super().__add__(other))

    def __radd__(self, other):
        return counted(str.__add__(other, self))


def counted(text):
    Counted.count += len(text)
    return Counted(text)


def searching(method):
    """The method of str, which reads the whole text."""

    def search(self, *args):
        Counted.count += len(self)
        result = method(self, *args)
        if isinstance(result, tuple):
            return tuple(map(Counted, result))
        return Counted(result) if isinstance(result, str) else result

    return search


for name in ("find", "rfind", "partition", "lstrip", "rstrip", "strip", "removeprefix", "split"):
    setattr(Counted, name, searching(getattr(str, name)))


def counting_pattern(pattern):
    compiled = re.compile(pattern)

    def counting(method):
        def search(text, start):
            match = method(text, start)
            Counted.count += (len(text) if match is None else match.end()) - start
            return match

        return search

    return SimpleNamespace(match=counting(compiled.match), search=counting(compiled.search))


@pytest.fixture
def counted_patterns(monkeypatch):
    counting = SimpleNamespace(compile=counting_pattern, escape=re.escape, Pattern=re.Pattern)
    monkeypatch.setattr(text_buffer, "re", counting)
    text_buffer._any_of.cache_clear()
    yield
    text_buffer._any_of.cache_clear()


def work(name, text, size):
    """Characters that are read or copied for each one of the text, which comes in such pieces."""
    parser, pieces = parsers(name), [text[i : i + size] for i in range(0, len(text), size)]
    Counted.count = 0
    deltas = [delta for piece in pieces for delta in parser.feed(Counted(piece))]
    merge_deltas(deltas + parser.finish())
    return Counted.count / len(text)


@pytest.mark.rotating(each_case=4)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("size", LENGTHS)
def test_the_work_is_linear_in_the_text(counted_patterns, name, size):
    starts, repeated = FORMATS[name]
    works = {
        start + part * 2: work(name, start + part * (LENGTHS[size] // len(part)), size)
        for start in ("", *starts)
        for part in (*repeated, *REPEATED, *JSON)
    }
    assert min(works.values()) >= 1, "some text was not counted"
    assert not {text: times for text, times in works.items() if times > MOST}
