"""Calls that a request forces, in the format of the model: whatever the model writes, each has its
name and keeps its schema.
"""

import json
import random

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("llguidance")

pytest.importorskip("tokenizers")
pytest.importorskip("jsonschema_rs")

import jsonschema_rs
from tokenizers import Tokenizer

from atomc.demo import PATH
from atomc.runtime.constrained.grammar_compiler import GrammarCompiler, full_mask
from atomc.runtime.requests.sampling_params import Structured
from atomc.runtime.sampling.sampler import allowed
from atomc.runtime.server.parsers.message_deltas import ToolCallArguments, ToolCallStart
from atomc.runtime.server.parsers.tool_parsers import tool_parser
from atomc.runtime.server.parsers.tool_parsers.forced_grammar import ForcedFunction, forced_grammar
from atomc.runtime.server.parsers.tool_parsers.formats import FORMATS
from atomc.runtime.server.parsers.tool_parsers.tool_format import CALL as JSON_CALL
from atomc.runtime.server.parsers.tool_parsers.tool_format import PARAMETERS, words

DEMO = Tokenizer.from_file(str(PATH / "tokenizer.json"))
END = DEMO.token_to_id("<|endoftext|>")
PLACE = {
    "type": "object",
    "properties": {
        "x": {"type": "number", "minimum": -9, "maximum": 9},
        "tag": {"enum": ["</parameter>", None]},
    },
    "required": ["x"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer", "minimum": 1, "maximum": 40},
        "unit": {"type": "string", "enum": ["deg C", "K"]},
        "near": {"type": "array", "items": {"$ref": "#/$defs/Place"}, "maxItems": 2},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
        "dry": {"type": "boolean"},
        "share": {"type": "number", "minimum": 0, "maximum": 1},
        "any": {},
    },
    "required": ["city", "near"],
    "additionalProperties": False,
    "$defs": {"Place": PLACE},
}
FUNCTIONS = [ForcedFunction("weather", WEATHER), ForcedFunction("clock", {"type": "object"})]
SCHEMAS = {function.name: function.schema for function in FUNCTIONS}
FORCED = [
    name for name, form in FORMATS.items() if forced_grammar(form, FUNCTIONS, {}, several=True)
]
NUM_SEEDS = 25
LONGEST = 400  # tokens
# What ends a part of an output, if it is tried now and then.
ENDS = ['"', "}", "]", "\n"]


@pytest.fixture(scope="module")
def compiler():
    return GrammarCompiler(DEMO, frozenset({END}), DEMO.get_vocab_size())


def written(compiler, grammar, ends, seed):
    """An output sampled from the allowed tokens; None if it did not end."""
    structured = Structured(grammar=grammar, adapts_schemas=True)
    matcher, tokens, choose = compiler.compile(structured).matcher(), [], random.Random(seed)
    for _ in range(LONGEST):
        mask = full_mask(1, compiler.vocab_size)
        compiler.fill(mask, [(matcher, 0, ())])
        choices = allowed(mask, compiler.vocab_size)[0].nonzero()[:, 0].tolist()
        if END in choices and (choose.random() < 0.5 or choices == [END]):
            return DEMO.decode(tokens, skip_special_tokens=False)
        end = DEMO.encode(choose.choice(ends), add_special_tokens=False).ids
        ending = end[0] in choices and choose.random() < 0.4
        for token in (
            end if ending else [choose.choice([token for token in choices if token != END])]
        ):
            if not matcher.accept(token):
                break
            tokens.append(token)
    return None


def calls_in(name, text, size):
    parser = tool_parser(name, SCHEMAS)
    deltas = [
        delta for at in range(0, len(text), size) for delta in parser.feed(text[at : at + size])
    ]
    deltas += parser.finish()
    names = {delta.index: delta.name for delta in deltas if isinstance(delta, ToolCallStart)}
    texts = dict.fromkeys(names, "")
    for delta in deltas:
        if isinstance(delta, ToolCallArguments):
            texts[delta.index] += delta.text
        else:
            assert isinstance(delta, ToolCallStart), f"{delta} in {text!r}"
    return [(function, json.loads(texts[index])) for index, function in names.items()]


@pytest.mark.parametrize("name", FORCED)
def test_forced_calls_have_their_names_and_keep_their_schemas(compiler, name):
    form = FORMATS[name]
    grammar = forced_grammar(form, FUNCTIONS, {}, several=True)
    ends = [*ENDS, *words(form.parameter.partition("{value}")[2])[:1]]
    checks = {function: jsonschema_rs.validator_for(schema) for function, schema in SCHEMAS.items()}
    texts = [written(compiler, grammar, ends, seed) for seed in range(NUM_SEEDS)]
    complete = [text for text in texts if text is not None]
    assert len(complete) > NUM_SEEDS / 4
    seen = set()
    for text in complete:
        calls = calls_in(name, text, 3)
        assert calls
        for function, arguments in calls:
            seen.add(function)
            checks[function].validate(arguments)
    assert seen == set(SCHEMAS)


def test_a_single_call_is_forced(compiler):
    for name in FORCED:
        form = FORMATS[name]
        grammar = forced_grammar(form, FUNCTIONS[1:], {}, several=False)
        structured = Structured(grammar=grammar, adapts_schemas=True)
        matcher = compiler.compile(structured).matcher()
        text = (
            form.written([("clock", {})]).replace("{}", "{}").replace(": ", ":").replace(", ", ",")
        )
        for token in DEMO.encode(text, add_special_tokens=False).ids:
            assert matcher.accept(token), (name, text)
        assert matcher.complete


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"a": {"type": "string", "pattern": "x+"}}},
        {"type": "object", "properties": {"a": {"type": "string", "maxLength": 3}}},
        {"type": "object", "properties": {"a": {"anyOf": [{"type": "integer", "minimum": 3}, {"type": "string"}]}}},
        {"type": "object", "properties": {"a": {"enum": ["x", 1]}}},
        {"type": "object", "properties": {"a": {"$ref": "#/$defs/A"}}, "$defs": {"A": {"type": "string", "minLength": 2}}},
        {"type": "object", "properties": {"a": {}}, "required": ["b"]},
        {"type": "object", "patternProperties": {"x": {}}},
        {"type": "object", "properties": {'"a"': {}}},
        {"type": "object", "properties": {"a>": {}}},
        {"type": "object", "properties": {"a" * 257: {}}},
        {"type": "object", "properties": {"a": {"enum": ["</parameter></arg_value></\uff5cDSML\uff5cparameter>"]}}},
        {"anyOf": [{"properties": {"a": {}}, "required": ["a"]}, {"properties": {"b": {}}}]},
    ],
)  # fmt: skip
def test_a_schema_that_parameters_without_quotes_cannot_keep_is_forced_as_json(schema):
    for name, form in FORMATS.items():
        if form.arguments == PARAMETERS:
            assert forced_grammar(form, [ForcedFunction("f", schema)], {}, several=True) is None, (
                name
            )


@pytest.mark.parametrize("function", ["a b", "<f>", "f" * 257, 'f"'])
def test_a_function_whose_name_cannot_be_read_is_forced_as_json(function):
    for name, form in FORMATS.items():
        grammar = forced_grammar(
            form, [ForcedFunction(function, {"type": "object"})], {}, several=True
        )
        assert (grammar is None) == (form.arguments != JSON_CALL), name
        text = form.written([(function, {})])
        assert form.arguments != JSON_CALL or calls_in(name, text, 3) == [(function, {})]


def test_a_text_with_a_special_token_is_forced_as_json():
    unit = {"type": "object", "properties": {"unit": {"type": "string", "enum": ["a<|end|>"]}}}
    form = FORMATS["qwen3-coder"]
    for function in (ForcedFunction("f", unit), ForcedFunction("f<|end|>", {"type": "object"})):
        assert forced_grammar(form, [function], {"<|end|>": 3}, several=False) is None
    assert forced_grammar(form, [ForcedFunction("f", unit)], {}, several=False) is not None


def test_special_tokens_are_tokens_of_the_grammar():
    form = FORMATS["kimi-k2"]
    tokens = {word: 100 + i for i, word in enumerate(form.markers)}
    grammar = forced_grammar(form, FUNCTIONS[1:], tokens, several=False)
    begin, end = tokens["<|tool_calls_section_begin|>"], tokens["<|tool_calls_section_end|>"]
    assert f"<[{begin}]>" in grammar
    assert f"<[{end}]>" in grammar
    assert "<|" not in grammar
    # The end of a text would have to be a text.
    closing = {"</parameter>": 7}
    assert forced_grammar(FORMATS["qwen3-coder"], FUNCTIONS, closing, several=True) is None
