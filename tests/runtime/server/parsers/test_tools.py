"""Tool call parsers: all formats, for complete texts and for any split into pieces."""

import json
import re
from dataclasses import replace

import pytest

pytest.importorskip("fastapi")

from hypothesis import given, settings
from hypothesis import strategies as st

from atomc.demo import PATH
from atomc.runtime.requests.sampling_params import Structured
from atomc.runtime.server.chat.chat import output_parser
from atomc.runtime.server.chat.tool_mode import ToolMode
from atomc.runtime.server.parsers.message_deltas import (
    ContentDelta,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallStart,
    merge_deltas,
)
from atomc.runtime.server.parsers.output_parser import OutputParser, uses_special_tokens
from atomc.runtime.server.parsers.reasoning_parsers import reasoning_parser
from atomc.runtime.server.parsers.tool_parsers import TOOL_PARSERS, detect_tool_parser, tool_parser
from atomc.runtime.server.parsers.tool_parsers.deepseek import (
    CALL,
    CALL_END,
    CALLS,
    CALLS_END,
    SEPARATOR,
)

CITY = '{"city": "Paris"}'


def parsed(parser, *parts):
    """All deltas, with adjacent ones of the same type merged, and numbered ids."""
    pieces = [piece for part in parts for piece in parser.feed(part)]
    return without_ids(merge_deltas(pieces + parser.finish()))


def without_ids(deltas):
    """The deltas with the ids of `called`."""
    return [
        replace(delta, id=f"id{delta.index}") if isinstance(delta, ToolCallStart) else delta
        for delta in deltas
    ]


def called(*calls, before="", after=""):
    """The deltas of a message with these calls, (name, arguments) each."""
    found = [ContentDelta(before)] if before else []
    for index, (name, arguments) in enumerate(calls):
        found += [ToolCallStart(index, f"id{index}", name)] + (
            [ToolCallArguments(index, arguments)] if arguments else []
        )
    return found + ([ContentDelta(after)] if after else [])


# name of the parser, text, pieces
CASES = {
    # Hermes, Qwen
    "hermes": ("hermes", f'<tool_call>\n{{"name": "f", "arguments": {CITY}}}\n</tool_call>', called(("f", CITY))),
    "hermes-with-content": (
        "hermes", f'I look.\n<tool_call>\n{{"name": "f", "arguments": {CITY}}}\n</tool_call>\nDone.',
        called(("f", CITY), before="I look.", after="\nDone."),
    ),
    "hermes-parallel": (
        "hermes", '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n'
        '<tool_call>\n{"name": "g", "arguments": {"a": [1, {"b": 2}]}}\n</tool_call>\n',
        called(("f", "{}"), ("g", '{"a": [1, {"b": 2}]}')),
    ),
    "hermes-name-last": ("hermes", f'<tool_call>{{"arguments": {CITY}, "name": "f"}}</tool_call>', called(("f", CITY))),
    "hermes-no-arguments": ("hermes", '<tool_call>{"name": "f"}</tool_call>', called(("f", "{}"))),
    "hermes-null-arguments": ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', called(("f", "{}"))),
    "hermes-arguments-as-text": (
        "hermes", f'<tool_call>{{"name": "f", "arguments": {json.dumps(CITY)}}}</tool_call>', called(("f", CITY)),
    ),
    "hermes-other-keys": (
        "hermes", '<tool_call>{"id": 3, "why": ["<x>"], "name": "f", "arguments": {"a": 1}, "b": true}</tool_call>',
        called(("f", '{"a": 1}')),
    ),
    "hermes-tags-in-a-text": (
        "hermes", '<tool_call>{"name": "f", "arguments": {"a": "</tool_call> } \\" <tool_call>"}}</tool_call>',
        called(("f", '{"a": "</tool_call> } \\" <tool_call>"}')),
    ),
    "hermes-brace-forgotten": ("hermes", f'<tool_call>{{"name": "f", "arguments": {CITY}</tool_call>ok',
                               called(("f", CITY), after="ok")),
    "hermes-tag-forgotten": (
        "hermes", f'<tool_call>{{"name": "f", "arguments": {CITY}}}\n<tool_call>{{"name": "g", "arguments": {CITY}}}',
        called(("f", CITY), ("g", CITY)),
    ),
    "hermes-arguments-break": (
        "hermes", '<tool_call>{"name": "f", "arguments": {"a": [1, </tool_call> more',
        called(("f", '{"a": [1, '), after=" more"),
    ),
    "hermes-cut-in-arguments": ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "x', called(("f", '{"a": "x'))),
    "hermes-cut-in-name": ("hermes", 'So <tool_call>{"name": "f', called(before='So <tool_call>{"name": "f')),
    "hermes-not-json": (
        "hermes", "<tool_call>{'name': 'f'}</tool_call>", called(before="<tool_call>{'name': 'f'}</tool_call>"),
    ),
    "hermes-no-name": (
        "hermes", '<tool_call>{"arguments": {}}</tool_call>', called(before='<tool_call>{"arguments": {}}</tool_call>'),
    ),
    "hermes-name-is-a-number": (
        "hermes", '<tool_call>{"name": 3, "arguments": {}}', called(before='<tool_call>{"name": 3, "arguments": {}}'),
    ),
    "hermes-arguments-are-a-list": (
        "hermes", '<tool_call>{"name": "f", "arguments": [1]}', called(before='<tool_call>{"name": "f", "arguments": [1]}'),
    ),
    "hermes-malformed-then-right": (
        "hermes", f'<tool_call>f()</tool_call><tool_call>{{"name": "f", "arguments": {CITY}}}</tool_call>',
        called(("f", CITY), before="<tool_call>f()</tool_call>"),
    ),
    "hermes-content-only": ("hermes", " a < b, <tool and \n", called(before=" a < b, <tool and \n")),
    # Llama
    "llama3": ("llama3", f'{{"name": "f", "parameters": {CITY}}}', called(("f", CITY))),
    "llama3-tag": ("llama3", f'<|python_tag|>{{"name": "f", "parameters": {CITY}}}', called(("f", CITY))),
    "llama3-type": ("llama3", f'{{"type": "function", "name": "f", "parameters": {CITY}}}\n', called(("f", CITY))),
    "llama3-parallel": (
        "llama3",
        f'{{"name": "f", "parameters": {CITY}}}; {{"name": "g", "parameters": {{}}}}\n{{"name": "h", "arguments": {{}}}}',
        called(("f", CITY), ("g", "{}"), ("h", "{}")),
    ),
    "llama3-content-then-tag": (
        "llama3", f'I look. <|python_tag|>{{"name": "f", "parameters": {CITY}}}', called(("f", CITY), before="I look."),
    ),
    "llama3-answer-in-json": ("llama3", '{"city": "Paris"}', called(before='{"city": "Paris"}')),
    "llama3-answer-with-a-name": ("llama3", '{"name": "Ann", "age": 3}', called(before='{"name": "Ann", "age": 3}')),
    "llama3-name-only": ("llama3", ' {"name": "Ann"}', called(before=' {"name": "Ann"}')),
    "llama3-built-in": (
        "llama3", '<|python_tag|>search.call(query="x")', called(before='<|python_tag|>search.call(query="x")'),
    ),
    "llama3-content": ("llama3", " Hello {you} <|python", called(before=" Hello {you} <|python")),
    "llama3-cut": ("llama3", '{"name": "f", "param', called(before='{"name": "f", "param')),
    "llama3-cut-in-arguments": ("llama3", '{"name": "f", "parameters": {"a', called(("f", '{"a'))),
    "llama3-content-after": ("llama3", '{"name": "f", "parameters": {}} Hello', called(("f", "{}"), after="Hello")),
    # DeepSeek
    "deepseek-v3.1": ("deepseek", f"{CALLS}{CALL}f{SEPARATOR}{CITY}{CALL_END}{CALLS_END}", called(("f", CITY))),
    "deepseek-v3": (
        "deepseek", f"I look.\n\n{CALLS}{CALL}function{SEPARATOR}f\n```json\n{CITY}\n```{CALL_END}\n"
        f"{CALL}function{SEPARATOR}g\n```json\n{{}}\n```{CALL_END}{CALLS_END}",
        called(("f", CITY), ("g", "{}"), before="I look."),
    ),
    "deepseek-a-tool-named-function": (
        "deepseek", f"{CALL}function{SEPARATOR}{CITY}{CALL_END}", called(("function", CITY)),
    ),
    "deepseek-end-forgotten": (
        "deepseek", f"{CALLS}{CALL}f{SEPARATOR}{CITY}{CALL}g{SEPARATOR}{{}}{CALLS_END}x",
        called(("f", CITY), ("g", "{}"), after="x"),
    ),
    "deepseek-no-separator": ("deepseek", f"{CALL}f {CITY}{CALL_END}", called(before=f"{CALL}f {CITY}{CALL_END}")),
    "deepseek-no-arguments": (
        "deepseek", f"{CALLS}{CALL}f{SEPARATOR}x{CALL_END}{CALLS_END}", called(before=f"{CALL}f{SEPARATOR}x{CALL_END}"),
    ),
    "deepseek-not-the-block": (
        "deepseek", f"{CALL}function{SEPARATOR}f\npython\n{{}}", called(before=f"{CALL}function{SEPARATOR}f\npython\n{{}}"),
    ),
    "deepseek-no-name": ("deepseek", f"{CALL}{SEPARATOR}{{}}", called(before=f"{CALL}{SEPARATOR}{{}}")),
    "deepseek-arguments-break": (
        "deepseek", f'{CALL}f{SEPARATOR}{{"a": [{CALL_END} x', called(("f", '{"a": ['), after=" x"),
    ),
    "deepseek-cut": ("deepseek", f"{CALLS}{CALL}f{SEPARATOR[:3]}", called(before=f"{CALL}f{SEPARATOR[:3]}")),
    # GPT-OSS
    "gpt-oss-call": (
        "gpt-oss", f"<|channel|>commentary to=functions.f <|constrain|>json<|message|>{CITY}<|call|>", called(("f", CITY)),
    ),
    "gpt-oss-recipient-in-the-role": (
        "gpt-oss", f" to=functions.f<|channel|>commentary json<|message|>{CITY}<|call|>", called(("f", CITY)),
    ),
    "gpt-oss-preamble-and-two-calls": (
        "gpt-oss", "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>commentary to=functions.f "
        f"<|constrain|>json<|message|>{CITY}<|call|>"
        "<|start|>assistant to=functions.g<|channel|>commentary<|message|>{}<|call|>",
        called(("f", CITY), ("g", "{}"), before="I look."),
    ),
    "gpt-oss-final": ("gpt-oss", "<|channel|>final<|message|>Hi <b>!<|return|>", called(before="Hi <b>!")),
    "gpt-oss-two-finals": (
        "gpt-oss", "<|channel|>final<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b",
        called(before="a\n\nb"),
    ),
    "gpt-oss-arguments-are-no-object": (
        "gpt-oss", "<|start|>assistant to=functions.f<|channel|>commentary<|message|>print()<|call|>",
        called(before="<|start|>assistant to=functions.f<|channel|>commentary<|message|>print()<|call|>"),
    ),
    "gpt-oss-analysis-is-not-its-business": (
        "gpt-oss", "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hi",
        called(before="<|start|>assistant<|channel|>analysis<|message|>Hm.<|end|>Hi"),
    ),
    "gpt-oss-plain": ("gpt-oss", "to be <or> not", called(before="to be <or> not")),
    "gpt-oss-header-cut": ("gpt-oss", "<|channel|>final", called(before="<|channel|>final")),
    "gpt-oss-arguments-break": (
        "gpt-oss", 'to=functions.f<|channel|>commentary<|message|>{"a": <|call|>', called(("f", '{"a": ')),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_text_is_understood(case):
    name, text, pieces = CASES[case]
    assert parsed(tool_parser(name), text) == pieces


@pytest.mark.parametrize("case", CASES)
def test_character_by_character_gives_the_same(case):
    name, text, pieces = CASES[case]
    assert parsed(tool_parser(name), *text) == pieces


@pytest.mark.parametrize("case", CASES)
def test_any_two_parts_give_the_same(case):
    name, text, pieces = CASES[case]
    for at in range(len(text)):
        assert parsed(tool_parser(name), text[:at], "", text[at:]) == pieces, at


# Fragments of the formats, so that random texts resemble calls.
FRAGMENTS = {
    "hermes": ["<tool_call>", "</tool_call>", '{"name": "f", "arguments": ', '{"a": "<"}', '"', "{", "}", "[", "]", ",",
               ":", '"name"', '"arguments"', '"f"', "1", "\\", "\n", " ", "<", "x"],
    "llama3": ["<|python_tag|>", '{"name": "f", "parameters": ', '{"a": 1}', '"', "{", "}", ",", ":", '"name"',
               '"parameters"', '"f"', ";", "\n", "<", "x", "[", "]"],
    "deepseek": [CALLS, CALL, SEPARATOR, CALL_END, CALLS_END, "function", "f", "\n```json\n", "\n```", "{", "}", '"', "\n",
                 "<"],
    "gpt-oss": ["<|start|>", "assistant", "<|channel|>", "analysis", "commentary", "final", " to=functions.", "f",
                "<|constrain|>", "json", "<|message|>", "<|end|>", "<|call|>", "<|return|>", "{", "}", '"', " ", "\n", "<",
                "to="],
}  # fmt: skip


@pytest.mark.parametrize("name", FRAGMENTS)
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_any_text_in_any_parts_gives_the_same_as_at_once(name, data):
    text = "".join(data.draw(st.lists(st.sampled_from(FRAGMENTS[name]), max_size=24)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    at_once = parsed(tool_parser(name), text)
    assert parsed(tool_parser(name), *parts) == at_once
    assert parsed(tool_parser(name), *text) == at_once


def written(name, calls):
    """The calls in the model's format."""
    if name == "hermes":
        bodies = [
            f'{{"name": {json.dumps(function)}, "arguments": {arguments}}}'
            for function, arguments in calls
        ]
        return "\n".join(f"<tool_call>\n{body}\n</tool_call>" for body in bodies)
    if name == "llama3":
        return "; ".join(
            f'{{"name": {json.dumps(function)}, "parameters": {arguments}}}'
            for function, arguments in calls
        )
    if name == "deepseek":
        return (
            CALLS
            + "".join(f"{CALL}{function}{SEPARATOR}{text}{CALL_END}" for function, text in calls)
            + CALLS_END
        )
    header = "<|channel|>commentary to=functions."
    messages = [
        f"{header}{function} <|constrain|>json<|message|>{arguments}<|call|>"
        for function, arguments in calls
    ]
    return "<|start|>assistant".join(messages)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)
CALLED = st.tuples(
    st.from_regex(r"[a-zA-Z_][\w-]{0,20}", fullmatch=True).filter(str.isascii),
    st.dictionaries(st.text(), JSON, max_size=4).map(json.dumps),
)


@pytest.mark.parametrize("name", FRAGMENTS)
@settings(max_examples=60, deadline=None)
@given(calls=st.lists(CALLED, min_size=1, max_size=3), size=st.integers(1, 7))
def test_calls_with_any_arguments_are_read_as_they_were_written(name, calls, size):
    text = written(name, calls)
    parts = [text[at : at + size] for at in range(0, len(text), size)]
    assert parsed(tool_parser(name), *parts) == called(*calls)


@pytest.mark.parametrize("name", FRAGMENTS)
def test_arguments_come_as_they_are_written_and_not_at_the_end(name):
    reader = tool_parser(name)
    arguments = json.dumps({"city": "Paris", "days": list(range(10))})
    text = written(name, [("f", arguments)])
    seen = [piece for char in text for piece in reader.feed(char)]
    fragments = [piece.text for piece in seen if isinstance(piece, ToolCallArguments)]
    assert "".join(fragments) == arguments
    assert len(fragments) == len(arguments)
    assert without_ids(seen)[0] == ToolCallStart(0, "id0", "f")


@pytest.mark.parametrize("name", ["hermes", "deepseek"])
def test_content_is_unchanged(name):
    reader = tool_parser(name)
    assert reader.feed("Let me <look") == [ContentDelta("Let me <look")]


def test_ids_are_new_each_time():
    text = '<tool_call>{"name": "f"}</tool_call>' * 2
    ids = [
        piece.id for piece in tool_parser("hermes").feed(text) if isinstance(piece, ToolCallStart)
    ]
    assert len(set(ids)) == 2
    assert all(re.fullmatch(r"call_[0-9a-f]{24}", found) for found in ids)


def test_an_unknown_parser_is_rejected():
    with pytest.raises(
        ValueError, match="unknown tool parser 'yaml', expected one of hermes, qwen3"
    ):
        tool_parser("yaml")


@pytest.mark.parametrize(
    "template, model_type, name",
    [
        (
            '...<tool_call>\n{"name": <function-name>, "arguments": ...}\n</tool_call>',
            "qwen3",
            "hermes",
        ),
        ("{'<tool_call>\\n<function=' + name}", "qwen3_moe", None),
        ("<tool_call>{name}\n<arg_key>", "glm4_moe", None),
        (f"{{{{ '{CALLS}{CALL}' }}}}", "deepseek_v3", "deepseek"),
        ('<|start_header_id|>... {"name": function name, "parameters": ...}', "llama", "llama3"),
        ("{{ '<|python_tag|>' }}", "llama", "llama3"),
        ("<|start|>assistant<|channel|>final<|message|>", None, "gpt-oss"),
        ("", "gpt_oss", "gpt-oss"),
        ("<|im_start|>", "qwen2", None),
    ],
)
def test_the_template_tells_the_parser(template, model_type, name):
    assert detect_tool_parser(template, model_type) == name
    assert name is None or name in TOOL_PARSERS


# With a reasoning parser before it


@pytest.mark.parametrize("size", [1, 2, 5, 1000])
def test_what_is_left_of_thinking_is_read_for_calls(size):
    text = (
        f'<think>\nI call <tool_call>.\n</think>\n\nSo.\n<tool_call>\n{{"name": "f", '
        f'"arguments": {CITY}}}\n</tool_call>'
    )
    answer = OutputParser(reasoning_parser("think"), tool_parser("hermes"))
    parts = [text[at : at + size] for at in range(0, len(text), size)]
    assert parsed(answer, *parts) == [
        ReasoningDelta("I call <tool_call>."),
        *called(("f", CITY), before="So."),
    ]


@pytest.mark.parametrize("size", [1, 2, 5, 1000])
def test_harmony_gives_reasoning_calls_and_content(size):
    text = (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.f "
        f"<|constrain|>json<|message|>{CITY}<|call|>"
        "<|start|>assistant<|channel|>analysis<|message|>So.<|end|>"
        "<|start|>assistant<|channel|>final<|message|>Done."
    )
    answer = output_parser("gpt-oss", ToolMode(parser_name="gpt-oss"), None)
    parts = [text[at : at + size] for at in range(0, len(text), size)]
    before = [ReasoningDelta("Hm."), ContentDelta("I look.")]
    after = [ReasoningDelta("\n\nSo."), ContentDelta("\n\nDone.")]
    assert parsed(answer, *parts) == [*before, *called(("f", CITY)), *after]


@pytest.mark.parametrize("end", ["", "<|end|>", "<|call|>"])
def test_harmony_arguments_with_an_open_string_contain_the_reasoning_that_follows(end):
    start = "<|channel|>commentary to=functions.f<|message|>"
    rest = (
        f'{{"a": "b{end}<|start|>assistant<|channel|>analysis<|message|>Hm.<|end|>'
        "<|start|>assistant<|channel|>final<|message|>Hi"
    )
    answer = output_parser("gpt-oss", ToolMode(parser_name="gpt-oss"), None)
    assert parsed(answer, start + rest) == called(("f", rest))


@pytest.mark.parametrize("reasoning", ["gpt-oss", "think"])
def test_forced_calls_have_markers_of_reasoning_in_their_strings(reasoning):
    arguments = '{"a": "<|start|>assistant<|channel|>analysis<|message|></think>"}'
    structured = Structured(json_schema={"type": "object"})
    mode = ToolMode(function_name="f", structured=structured)
    answer = output_parser(reasoning, mode, None)
    assert parsed(answer, arguments) == called(("f", arguments))


def test_a_harmony_call_without_a_space_before_its_recipient_is_read():
    answer = output_parser("gpt-oss", ToolMode(parser_name="gpt-oss"), None)
    text = f"to=functions.f<|channel|>commentary<|message|>{CITY}<|call|>"
    assert parsed(answer, text) == called(("f", CITY))


def test_without_parsers_all_is_content():
    assert parsed(OutputParser(None, None), "<think>", "", "<tool_call>") == [
        ContentDelta("<think><tool_call>")
    ]


def test_text_must_be_made_with_special_tokens_if_markers_are_special():
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(str(PATH / "tokenizer.json"))
    parsers = tool_parser("hermes"), reasoning_parser("think"), None
    tokenizer.add_tokens(["<tool_call>", "<think>"])
    assert not uses_special_tokens(tokenizer, *parsers)
    tokenizer.add_special_tokens(["</think>"])
    assert uses_special_tokens(tokenizer, *parsers)
