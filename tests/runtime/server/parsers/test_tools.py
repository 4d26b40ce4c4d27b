"""Tool call parsers: all formats, for complete texts and for any split into pieces."""

import json
import keyword
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest

pytest.importorskip("fastapi")

from hypothesis import given, settings
from hypothesis import strategies as st

from atomc.demo import PATH
from atomc.runtime.requests.sampling_params import Structured
from atomc.runtime.server.chat import tool_mode as tool_mode_module
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
from atomc.runtime.server.parsers.tool_parsers.formats import ALIASES, FORMATS
from atomc.runtime.server.parsers.tool_parsers.tool_format import CALL as JSON_CALL
from atomc.runtime.server.parsers.tool_parsers.tool_format import OBJECT, PARAMETERS, UNQUOTED
from atomc.runtime.server.service.protocol import ChatRequest

CITY = '{"city": "Paris"}'
CALLS, CALLS_END = (
    "<\uff5ctool\u2581calls\u2581begin\uff5c>",
    "<\uff5ctool\u2581calls\u2581end\uff5c>",
)
CALL, CALL_END = "<\uff5ctool\u2581call\u2581begin\uff5c>", "<\uff5ctool\u2581call\u2581end\uff5c>"
SEPARATOR, DSML = "<\uff5ctool\u2581sep\uff5c>", "\uff5cDSML\uff5c"
# Types of parameters for which a format has no quotes.
SCHEMAS = {
    "f": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "share": {"type": "number"},
            "dry": {"type": "boolean"},
            "near": {"type": "array"},
            "at": {"$ref": "#/$defs/Place"},
            "note": {"type": ["string", "null"]},
            "count": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
            "mode": {"enum": ["1", "2"]},
        },
        "$defs": {"Place": {"type": "object"}},
    }
}


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
    "deepseek-v3.1": ("deepseek-v3.1", f"{CALLS}{CALL}f{SEPARATOR}{CITY}{CALL_END}{CALLS_END}", called(("f", CITY))),
    "deepseek-v3": (
        "deepseek-v3", f"I look.\n\n{CALLS}{CALL}function{SEPARATOR}f\n```json\n{CITY}\n```{CALL_END}\n"
        f"{CALL}function{SEPARATOR}g\n```json\n{{}}\n```{CALL_END}{CALLS_END}",
        called(("f", CITY), ("g", "{}"), before="I look."),
    ),
    "deepseek-a-tool-named-function": (
        "deepseek-v3.1", f"{CALL}function{SEPARATOR}{CITY}{CALL_END}", called(("function", CITY)),
    ),
    "deepseek-end-forgotten": (
        "deepseek-v3.1", f"{CALLS}{CALL}f{SEPARATOR}{CITY}{CALL}g{SEPARATOR}{{}}{CALLS_END}x",
        called(("f", CITY), ("g", "{}"), after="x"),
    ),
    "deepseek-no-separator": ("deepseek-v3.1", f"{CALL}f {CITY}{CALL_END}", called(before=f"{CALL}f {CITY}{CALL_END}")),
    "deepseek-arguments-are-no-object": (
        "deepseek-v3.1", f"{CALLS}{CALL}f{SEPARATOR}x{CALL_END}{CALLS_END}",
        called(before=f"{CALLS}{CALL}f{SEPARATOR}x{CALL_END}{CALLS_END}"),
    ),
    "deepseek-no-arguments": ("deepseek-v3.1", f"{CALLS}{CALL}f{SEPARATOR}{CALL_END}{CALLS_END}", called(("f", "{}"))),
    "deepseek-second-is-no-call": (
        "deepseek-v3.1", f"{CALLS}{CALL}f{SEPARATOR}{{}}{CALL_END}{CALL}g{SEPARATOR}x", called(("f", "{}"), after=f"{CALL}g{SEPARATOR}x"),
    ),
    "deepseek-not-the-block": (
        "deepseek-v3", f"{CALL}function{SEPARATOR}f\npython\n{{}}", called(before=f"{CALL}function{SEPARATOR}f\npython\n{{}}"),
    ),
    "deepseek-no-name": ("deepseek-v3.1", f"{CALL}{SEPARATOR}{{}}", called(before=f"{CALL}{SEPARATOR}{{}}")),
    "deepseek-arguments-break": (
        "deepseek-v3.1", f'{CALLS}{CALL}f{SEPARATOR}{{"a": [{CALL_END}{CALLS_END} x', called(("f", '{"a": ['), after=" x"),
    ),
    "deepseek-cut": ("deepseek-v3.1", f"{CALLS}{CALL}f{SEPARATOR[:3]}", called(before=f"{CALLS}{CALL}f{SEPARATOR[:3]}")),
    # others, whose calls JSON objects do not hold
    "qwen3-coder": (
        "qwen3-coder",
        "I look.\n\n<tool_call>\n<function=f>\n<parameter=city>\nParis \"<b>\"\n\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
        "<parameter=dry>\nTrue\n</parameter>\n<parameter=near>\n['a', None]\n</parameter>\n"
        "<parameter=at>\n{\"x\": 1}\n</parameter>\n</function>\n</tool_call>",
        called(("f", '{"city": "Paris \\"<b>\\"\\n", "days": 3, "dry": true, "near": ["a", null], "at": {"x": 1}}'),
               before="I look."),
    ),
    "qwen3-coder-types": (
        "qwen3-coder",
        "<tool_call><function=f><parameter=note>None</parameter><parameter=count>4</parameter><parameter=mode>1</parameter>"
        "<parameter=share>2</parameter><parameter=days>many</parameter><parameter=other>[1]</parameter>"
        "<parameter=more>yes</parameter></function></tool_call>",
        called(("f", '{"note": null, "count": 4, "mode": "1", "share": 2, "days": "many", "other": [1], "more": "yes"}')),
    ),
    "qwen3-coder-parallel": (
        "qwen3-coder", "<tool_call>\n<function=f>\n</function>\n</tool_call>\n<tool_call>\n<function=g>\n"
        "<parameter=a>\n\n</parameter>\n</function>\n</tool_call>", called(("f", "{}"), ("g", '{"a": ""}')),
    ),
    "qwen3-coder-outer-tag-forgotten": (
        "qwen3-coder", "So:\n<function=f>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>",
        called(("f", CITY), before="So:"),
    ),
    "qwen3-coder-end-forgotten": (
        "qwen3-coder", "<tool_call>\n<function=f>\n<parameter=city>\nParis\n</parameter>\n</tool_call>\n<tool_call><function=g></function>",
        called(("f", CITY), ("g", "{}")),
    ),
    "qwen3-coder-words-between": (
        "qwen3-coder", "<function=f>so <parameter=city>\nParis\n</parameter> and </function></tool_call>",
        called(before="<function=f>so <parameter=city>\nParis\n</parameter> and </function></tool_call>"),
    ),
    "qwen3-coder-words-after-a-parameter": (
        "qwen3-coder", "<function=f><parameter=city>\nParis\n</parameter> and <b> </function></tool_call>x",
        called(("f", CITY), after="x"),
    ),
    "qwen3-coder-cut-in-a-text": (
        "qwen3-coder", "<tool_call>\n<function=f>\n<parameter=city>\nPar", called(("f", '{"city": "Par')),
    ),
    "qwen3-coder-cut-in-a-number": (
        "qwen3-coder", "<tool_call>\n<function=f>\n<parameter=days>\n12", called(("f", '{"days": ')),
    ),
    "qwen3-coder-cut-in-the-name": (
        "qwen3-coder", "<tool_call>\n<function=f", called(before="<tool_call>\n<function=f"),
    ),
    "qwen3-coder-no-name": (
        "qwen3-coder", "<tool_call>\n<function=>\n</function>", called(before="<tool_call>\n<function=>\n</function>"),
    ),
    "qwen3-coder-mentions-the-tags": (
        "qwen3-coder", "Write <tool_call> and <function=...> around it.", called(before="Write <tool_call> and <function=...> around it."),
    ),
    "qwen3-coder-numbers-without-end": (
        "qwen3-coder", "<function=f><parameter=days>1e999</parameter><parameter=share>1e999</parameter></function></tool_call>",
        called(("f", '{"days": "1e999", "share": "1e999"}')),
    ),
    "qwen3-coder-a-lone-surrogate": (
        "qwen3-coder", "<function=f><parameter=near>['\\ud800']</parameter></function></tool_call>",
        called(("f", '{"near": ["\\ud800"]}')),
    ),
    "pythonic-a-lone-surrogate": ("pythonic", "[f(city='\\ud800')]", called(("f", '{"city": "\\ud800"}'))),
    "hermes-a-name-with-a-lone-surrogate": (
        "hermes", '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>',
        called(before='<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'),
    ),
    "glm-a-key-with-brackets": (
        "glm-4.5", "<tool_call>f\n<arg_key>days[0]</arg_key>\n<arg_value>3</arg_value>\n</tool_call>",
        called(("f", '{"days[0]": 3}')),
    ),
    "qwen3-coder-end-of-a-value-in-a-list": (
        "qwen3-coder", '<function=f><parameter=near> ["</parameter>", \'</parameter>"\'] </parameter></function>',
        called(("f", '{"near": ["</parameter>", "</parameter>\\""]}')),
    ),
    "qwen3-coder-list-without-its-end": (
        "qwen3-coder", '<function=f><parameter=near>["a", </parameter><parameter=days>2</parameter></function>',
        called(("f", '{"near": "[\\"a\\", ", "days": 2}')),
    ),
    "seed-oss": (
        "seed-oss", "<seed:tool_call>\n<function=f>\n<parameter=city>Paris</parameter>\n</function>\n</seed:tool_call>",
        called(("f", CITY)),
    ),
    "glm": (
        "glm-4.5", "So.<tool_call>f\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n<arg_key>days</arg_key>\n"
        "<arg_value>3</arg_value>\n</tool_call>\n<tool_call>g</tool_call>",
        called(("f", '{"city": "Paris", "days": 3}'), ("g", "{}"), before="So."),
    ),
    "glm-no-call": ("glm-4.5", "<tool_call>f and g</tool_call>", called(before="<tool_call>f and g</tool_call>")),
    "minimax": (
        "minimax-m2", '<minimax:tool_call>\n<invoke name="f">\n<parameter name="city">Paris</parameter>\n</invoke>\n'
        '<invoke name="g">\n</invoke>\n</minimax:tool_call>\nDone', called(("f", CITY), ("g", "{}"), after="\nDone"),
    ),
    "dsml": (
        "deepseek-v3.2", f'<{DSML}function_calls>\n<{DSML}invoke name="g">\n<{DSML}parameter name="a" string="true">1'
        f'</{DSML}parameter>\n<{DSML}parameter name="b" string="false">1</{DSML}parameter>\n</{DSML}invoke>\n'
        f"</{DSML}function_calls>", called(("g", '{"a": "1", "b": 1}')),
    ),
    "gemma": (
        "gemma-4", 'So <|tool_call>call:f{city:<|"|>Pa"ris<|"|>,days:[1,2.5,{a:true}],x:{},n:null}<tool_call|>',
        called(("f", '{"city":"Pa\\"ris","days":[1,2.5,{"a":true}],"x":{},"n":null}'), before="So"),
    ),
    "gemma-parallel": (
        "gemma-4", "<|tool_call>call:f{}<tool_call|><|tool_call>call:g{a:1}<tool_call|>x", called(("f", "{}"), ("g", '{"a":1}'), after="x"),
    ),
    "gemma-breaks": ("gemma-4", "<|tool_call>call:f{a:[1}<tool_call|>x", called(("f", '{"a":[1'), after="x")),
    "gemma-bare-word": ("gemma-4", "<|tool_call>call:f{a:b c}<tool_call|>", called(("f", '{"a":"b c"}'))),
    "mistral": ("mistral", f"So[TOOL_CALLS]f[ARGS]{CITY}[TOOL_CALLS]g[CALL_ID]123456789[ARGS]{{}}",
                called(("f", CITY), ("g", "{}"), before="So")),
    "mistral-without-args": ("mistral", f"[TOOL_CALLS]f{CITY}", called(("f", CITY))),
    "mistral-list": ("mistral-list", f'[TOOL_CALLS] [{{"name": "f", "arguments": {CITY}, "id": "1"}}, {{"name": "g", "arguments": {{}}}}]',
                     called(("f", CITY), ("g", "{}"))),
    "mistral-list-of-numbers": ("mistral-list", "[TOOL_CALLS] [1, 2]", called(before="[TOOL_CALLS] [1, 2]")),
    "kimi": (
        "kimi-k2", f"<|tool_calls_section_begin|><|tool_call_begin|>functions.a.f:0<|tool_call_argument_begin|>{CITY}<|tool_call_end|>"
        f"<|tool_call_begin|>g<|tool_call_argument_begin|>{CITY}<|tool_call_end|><|tool_calls_section_end|>",
        called(("a.f", CITY), ("g", CITY)),
    ),
    "phi": ("phi-4-mini", f'<|tool_call|>[{{"name": "f", "arguments": {CITY}}}]<|/tool_call|>', called(("f", CITY))),
    "granite": ("granite-3", f'<|tool_call|>[{{"arguments": {CITY}, "name": "f"}}] and', called(("f", CITY), after=" and")),
    "command-a": (
        "command-a", '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "f", "parameters": {"city": "Paris"}}\n]<|END_ACTION|>',
        called(("f", CITY)),
    ),
    "internlm": (
        "internlm", f'So<|action_start|><|plugin|>\n{{"name": "f", "parameters": {CITY}}}<|action_end|>\n', called(("f", CITY), before="So"),
    ),
    "pythonic": (
        "pythonic", "[f(city='Pa)ris', near=[1, (2, 'x')], at={'a': None}, dry=-1.5), a.g()]",
        called(("f", '{"city": "Pa)ris", "near": [1, [2, "x"]], "at": {"a": null}, "dry": -1.5}'), ("a.g", "{}")),
    ),
    "pythonic-tag": ("pythonic", 'So. <|python_start|>[f(city="Paris")]<|python_end|>',
                     called(("f", CITY), before="So.", after="<|python_end|>")),
    "pythonic-list": ("pythonic", "[1, 2]", called(before="[1, 2]")),
    "pythonic-positional": ("pythonic", "[f('Paris')]", called(before="[f('Paris')]")),
    "pythonic-no-literal": ("pythonic", "[f(city=open('x'))] so", called(before="[f(city=open('x'))] so")),
    "pythonic-cut": ("pythonic", "[f(city='Par", called(before="[f(city='Par")),
    "olmo": ("olmo-3", 'So.\n<function_calls>f(city="Paris")\ng()</function_calls>', called(("f", CITY), ("g", "{}"), before="So.")),
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
    assert parsed(tool_parser(name, SCHEMAS), text) == pieces


@pytest.mark.parametrize("case", CASES)
def test_character_by_character_gives_the_same(case):
    name, text, pieces = CASES[case]
    assert parsed(tool_parser(name, SCHEMAS), *text) == pieces


@pytest.mark.parametrize("case", CASES)
def test_any_two_parts_give_the_same(case):
    name, text, pieces = CASES[case]
    for at in range(len(text)):
        assert parsed(tool_parser(name, SCHEMAS), text[:at], "", text[at:]) == pieces, at


# Fragments of the formats, so that random texts resemble calls.
PUNCTUATION = [
    "{",
    "}",
    "[",
    "]",
    '"',
    ",",
    ":",
    "(",
    ")",
    "=",
    "'",
    "\\",
    "\n",
    " ",
    ";",
    "<",
    "f",
    "x",
    "1",
    '"name"',
]
FRAGMENTS = {
    **{
        name: [*form.markers, form.written([("f", {"city": "<", "days": [1]})]), *PUNCTUATION]
        for name, form in FORMATS.items()
    },
    "gpt-oss": ["<|start|>", "assistant", "<|channel|>", "analysis", "commentary", "final", " to=functions.", "f",
                "<|constrain|>", "json", "<|message|>", "<|end|>", "<|call|>", "<|return|>", "{", "}", '"', " ", "\n", "<",
                "to="],
}  # fmt: skip


@pytest.mark.rotating(each_case=3)
@pytest.mark.parametrize("name", FRAGMENTS)
@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_any_text_in_any_parts_gives_the_same_as_at_once(name, data):
    text = "".join(data.draw(st.lists(st.sampled_from(FRAGMENTS[name]), max_size=24)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    at_once = parsed(tool_parser(name, SCHEMAS), text)
    assert parsed(tool_parser(name, SCHEMAS), *parts) == at_once
    assert parsed(tool_parser(name, SCHEMAS), *text) == at_once


def written(name, calls):
    """The calls, (name, arguments) each, in the model's format."""
    if name in FORMATS:
        return FORMATS[name].written(calls)
    header = "<|channel|>commentary to=functions."
    messages = [
        f"{header}{function} <|constrain|>json<|message|>{json.dumps(arguments)}<|call|>"
        for function, arguments in calls
    ]
    return "<|start|>assistant".join(messages)


# What ends a value, which no format lets stand in it.
TEXTS = st.text().filter(lambda text: not re.search(r"</|<\|\"\|>", text))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.from_regex(r"[a-z]\w*", fullmatch=True), inner, max_size=3),
)  # fmt: skip
CALLED = st.tuples(
    st.from_regex(r"[a-zA-Z_]\w{0,20}", fullmatch=True).filter(
        lambda name: name.isascii() and not keyword.iskeyword(name)
    ),
    st.dictionaries(st.sampled_from(["a", "city", "days", "\u00c4_1"]), JSON, max_size=4),
)
TYPES = {type(None): "null", bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}  # fmt: skip


def schemas_of(calls):
    """What the calls are checked with: the types of their arguments."""
    return {
        name: {
            "properties": {key: {"type": TYPES[type(value)]} for key, value in arguments.items()}
        }
        for name, arguments in calls
    }


def read(deltas):
    """The calls of the deltas, (name, arguments) each."""
    starts = [delta.name for delta in deltas if isinstance(delta, ToolCallStart)]
    texts = [delta.text for delta in deltas if isinstance(delta, ToolCallArguments)]
    assert len(deltas) == len(starts) + len(texts), "content beside the calls"
    return [(name, json.loads(text)) for name, text in zip(starts, texts, strict=True)]


@pytest.mark.parametrize("name", FRAGMENTS)
@settings(max_examples=40, deadline=None)
@given(
    calls=st.lists(CALLED, min_size=1, max_size=3, unique_by=lambda call: call[0]),
    size=st.integers(1, 7),
)
def test_calls_with_any_arguments_are_read_as_they_were_written(name, calls, size):
    text = written(name, calls)
    parts = [text[at : at + size] for at in range(0, len(text), size)]
    assert read(parsed(tool_parser(name, schemas_of(calls)), *parts)) == calls


STREAMED = [
    *(name for name, form in FORMATS.items() if form.arguments in (JSON_CALL, OBJECT, PARAMETERS, UNQUOTED)),
    "gpt-oss",
]  # fmt: skip


@pytest.mark.parametrize("name", STREAMED)
def test_arguments_come_as_they_are_written_and_not_at_the_end(name):
    reader = tool_parser(name, SCHEMAS)
    text = written(name, [("f", {"city": "x" * 50})])
    seen = [piece for char in text for piece in reader.feed(char)]
    fragments = [piece.text for piece in seen if isinstance(piece, ToolCallArguments)]
    assert json.loads("".join(fragments)) == {"city": "x" * 50}
    assert len(fragments) >= 50
    assert without_ids(seen)[0] == ToolCallStart(0, "id0", "f")


@pytest.mark.parametrize("name", ["hermes", "deepseek-v3.1", "qwen3-coder", "mistral"])
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
        ValueError, match=r"unknown tool parser 'yaml', expected one of deepseek-v4, "
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
        ("{'<tool_call>\\n<function=' + name}\\n<parameter=", "qwen3_moe", "qwen3-coder"),
        ("<tool_call>{name}\n<arg_key>", "glm4_moe", "glm-4.5"),
        (f"{{{{ '{CALLS}{CALL}' }}}}", "deepseek_v3", "deepseek-v3.1"),
        (f"{{{{ '{CALLS}{CALL}function{SEPARATOR}' }}}}\n```json", "deepseek_v3", "deepseek-v3"),
        ("'[TOOL_CALLS]' + name + '[ARGS]'", "mistral3", "mistral"),
        ("'[TOOL_CALLS] ['", "mistral", "mistral-list"),
        ("'<|tool_call>call:' ... '<tool_call|>'", "gemma4", "gemma-4"),
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


@pytest.mark.parametrize("name", FORMATS)
def test_a_template_that_writes_a_format_has_that_format(name):
    """Also if another format has some of its words."""
    form = FORMATS[name]
    assert all(detect_tool_parser(" ".join(words)) == name for words in form.seen_in)
    assert detect_tool_parser(form.written([("func_name1", {"parameters": 1})])) in (name, None)


def test_other_names_are_of_formats():
    assert set(ALIASES.values()) <= {*FORMATS, "gpt-oss"}
    assert not set(ALIASES) & set(FORMATS)


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


def test_calls_of_an_unknown_format_are_content_with_one_warning(caplog):
    tool = {"type": "function", "function": {"name": "f", "parameters": None}}
    body = ChatRequest.model_validate(
        {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "tools": [tool]}
    )
    service = SimpleNamespace(model=SimpleNamespace(tools=None))
    tool_mode_module._warn_of_unknown_format.cache_clear()
    modes = [tool_mode_module.tool_mode(service, body) for _ in range(2)]
    assert [mode.parser() for mode in modes] == [None, None]
    assert modes[0].template_tools, "the model still sees the tools"
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 1
    assert "--tool-call-parser" in warnings[0]


def test_parameters_without_quotes_have_the_types_of_their_tool():
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    body = ChatRequest.model_validate(
        {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "tools": [tool]}
    )
    service = SimpleNamespace(model=SimpleNamespace(tools="qwen3-coder"))
    parser = tool_mode_module.tool_mode(service, body).parser()
    text = FORMATS["qwen3-coder"].written([("f", {"city": "12"})])
    assert parsed(parser, text) == called(("f", '{"city": "12"}'))


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
