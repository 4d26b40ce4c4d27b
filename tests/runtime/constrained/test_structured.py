"""Structured output: any output sampled under the masks matches the grammar."""

import json
import os
import random
import re
import signal
import sys
import unicodedata

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atomc import demo
from atomc.runtime.constrained import grammar_validator
from atomc.runtime.constrained.grammar_compiler import GrammarCompiler, full_mask
from atomc.runtime.constrained.grammar_source import source
from atomc.runtime.requests.sample_spec import SampleSpec
from atomc.runtime.requests.sampling_params import SamplingParams, Structured
from atomc.runtime.sampling.sampler import Sampler, allowed
from atomc.runtime.text.detokenizer import TokenTexts

pytest.importorskip("llguidance")
tokenizers = pytest.importorskip("tokenizers")
DEMO = tokenizers.Tokenizer.from_file(str(demo.PATH / "tokenizer.json"))
TEXTS = TokenTexts(DEMO)
END = DEMO.token_to_id("<|endoftext|>")
# More tokens than the tokenizer has, as in models with a padded vocabulary.
VOCAB = DEMO.get_vocab_size() + 50
GRAMMARS = GrammarCompiler(DEMO, frozenset({END}), VOCAB)
SHORT_OF_TIME = GrammarCompiler(DEMO, frozenset({END}), VOCAB, seconds=0.3)

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
        "more": {"anyOf": [{"type": "null"}, {"$ref": "#"}]},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
LIST = """
start: "[" item ("," item)* "]"
item: /[0-9]{1,3}/
"""


def may_follow(matcher):
    mask = full_mask(1, GRAMMARS.vocab_size)
    GRAMMARS.fill(mask, [(matcher, 0, ())])
    return allowed(mask, VOCAB)[0].nonzero()[:, 0].tolist()


def written(structured, generator, length=400):
    """The bytes of an output sampled uniformly from the allowed tokens; None if it did not end."""
    matcher, tokens = GRAMMARS.compile(structured).matcher(), []
    for _ in range(length):
        choices = may_follow(matcher)
        assert choices and max(choices) < DEMO.get_vocab_size()
        token = END if END in choices and generator.random() < 0.5 else generator.choice(choices)
        assert matcher.accept(token)
        if matcher.finished:
            return b"".join(map(TEXTS.bytes, tokens))
        tokens.append(token)
    return None


def is_person(value):
    return (
        value.keys() <= {"name", "age", "tags", "more"}
        and isinstance(value["name"], str)
        and len(value["name"]) <= 8
        and value["age"] in range(151)
        and set(value.get("tags", [])) <= {"a", "b"}
        and len(value.get("tags", [])) <= 3
        and (value.get("more") is None or is_person(value["more"]))
    )


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**9))
def test_any_draw_under_a_schema_is_json_that_fulfils_it(seed):
    text = written(Structured(json_schema=PERSON), random.Random(seed))
    assert text is None or is_person(json.loads(text))


@pytest.mark.parametrize("text", ["e\u0301", "\u212b", "(\U0002fa1d)"])
def test_a_text_that_the_tokenizer_would_bring_into_another_form_is_written_as_it_is(text):
    assert unicodedata.normalize("NFC", text) != text
    assert written(Structured(choice=(text,)), random.Random(0)) == text.encode()
    schema = {"enum": [text]}
    found = written(Structured(json_schema=schema), random.Random(0))
    assert json.loads(found) == text


def with_added_tokens():
    """The demo's tokenizer with tokens as Qwen3 adds them, and a compiler for it."""
    tokenizer = tokenizers.Tokenizer.from_str(DEMO.to_str())
    tokenizer.add_tokens(["<think>", "</think>", "a b"])
    tokenizer.add_special_tokens(["<|im_end|>"])
    size = tokenizer.get_vocab_size()
    return tokenizer, GrammarCompiler(tokenizer, frozenset({END}), size)


ADDED, OF_ADDED = with_added_tokens()


def masked(matcher, compiler, size):
    mask = full_mask(1, compiler.vocab_size)
    compiler.fill(mask, [(matcher, 0, ())])
    return allowed(mask, size)[0].nonzero()[:, 0].tolist()


@pytest.mark.parametrize(
    "structured",
    [
        Structured(regex="<think>[a-z]{3}</think>"),
        Structured(regex="(ab){20}</think>"),
        Structured(regex="[a-z]<(think|tool)><\\|im_end\\|>"),
        Structured(choice=("<think>", "a bc")),
        Structured(json_schema={"enum": ["</think>"]}),
        Structured(json_schema={"type": "object", "properties": {"<|im_end|>": {"const": "a b"}}}),
        Structured(grammar='start: "<think>" /[a-c]+/ "</think>"'),
    ],
)
def test_the_text_of_added_tokens_is_text_in_every_kind_of_grammar(structured):
    for seed in range(3):
        matcher, generator = OF_ADDED.compile(structured).matcher(), random.Random(seed)
        while not matcher.finished and not (matcher.complete and generator.random() < 0.2):
            choices = masked(matcher, OF_ADDED, ADDED.get_vocab_size())
            assert choices and matcher.accept(generator.choice(choices)), matcher.error


def test_an_added_token_that_is_text_may_be_written_as_one_token_or_as_several():
    matcher = OF_ADDED.compile(Structured(regex="<think>x")).matcher()
    ids = masked(matcher, OF_ADDED, ADDED.get_vocab_size())
    assert set(ids) == {ADDED.token_to_id("<"), ADDED.token_to_id("<think>")}
    assert matcher.accept(ADDED.token_to_id("<think>"))
    special = OF_ADDED.compile(Structured(choice=("<|im_end|>",))).matcher()
    assert ADDED.token_to_id("<|im_end|>") not in masked(special, OF_ADDED, ADDED.get_vocab_size())
    named = OF_ADDED.compile(Structured(grammar='start: "a" <|im_end|>')).matcher()
    assert named.accept(ADDED.token_to_id("a")) and named.accept(ADDED.token_to_id("<|im_end|>"))


def only_text(schema):
    """The only text under a schema."""
    return written(Structured(json_schema=schema), random.Random(0)).decode()


@pytest.mark.parametrize("name", ["path", "int64", "uri-reference", "idn-email", "x y"])
def test_an_unknown_format_is_an_annotation(name):
    schema = {"type": "object", "properties": {"p": {"enum": ["a"], "format": name}}}
    assert only_text({**schema, "required": ["p"]}) == '{"p":"a"}'
    assert not re.fullmatch(r"\d{4}-\d\d-\d\d", only_text({"enum": ["no"], "format": name}))
    date = written(Structured(json_schema={"type": "string", "format": "date"}), random.Random(0))
    assert re.fullmatch(rb'"\d{4}-\d\d-\d\d"', date)


@pytest.mark.parametrize(
    "keyword",
    [
        "type",
        "properties",
        "required",
        "additionalProperties",
        "$defs",
        "$ref",
        "anyOf",
        "enum",
        "minProperties",
        "patternProperties",
        "format",
        "description",
        "items",
        "oneOf",
        "allOf",
    ],
)
def test_null_for_a_keyword_is_the_same_as_without_it(keyword):
    names = {"a": {"const": None, keyword: None}}
    schema = {"type": "object", "properties": names, "required": ["a"], keyword: None}
    others = {name: value for name, value in schema.items() if value is not None}
    assert only_text({"anyOf": [schema]}) == only_text({"anyOf": [others]})
    if keyword not in ("type", "properties", "required"):
        assert only_text(schema) == '{"a":null}'


@pytest.mark.parametrize(
    "schema, least",
    [
        ({"patternProperties": {"^[a-c]$": {"enum": [1]}}, "additionalProperties": False}, 1),
        ({"additionalProperties": {"enum": [1]}}, 1),
        ({}, 1),
        ({"properties": {"a": {"enum": [1]}}, "required": ["a"], "additionalProperties": {}}, 2),
        ({"properties": {"a": {}, "b": {}}, "required": ["b", "a"]}, 2),
    ],
)
def test_objects_have_as_many_different_properties_as_the_schema_demands(schema, least):
    """Of names that are not named, two may be one: such a schema is refused."""
    full = {"type": "object", **schema, "minProperties": least}
    text = written(Structured(json_schema=full), random.Random(1), 100)
    assert text is None or len(json.loads(text)) >= least
    if schema.get("properties", {}).keys() != {"a", "b"}:
        with pytest.raises(ValueError, match=f"minProperties is {least + 1}, expected at most"):
            GRAMMARS.compile(Structured(json_schema={**full, "minProperties": least + 1}))


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**9))
def test_any_draw_of_a_json_object_is_one(seed):
    text = written(Structured(json_object=True), random.Random(seed))
    assert text is None or isinstance(json.loads(text), dict)


@pytest.mark.parametrize(
    ("text", "more", "fits"),
    [
        ('{"name":"Ann","age":3,"tags":["a","b"]}', {}, True),
        ('{"name": "Ann", "age": 3}', {}, False),
        ('{"name": "Ann", "age": 3}', {"x-guidance": {"whitespace_flexible": True}}, True),
    ],
)
def test_json_is_compact_unless_the_schema_says_otherwise(text, more, fits):
    matcher = GRAMMARS.compile(Structured(json_schema={**PERSON, **more})).matcher()
    assert all(matcher.accept(token) for token in DEMO.encode(text).ids) == fits


@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 10**9),
    st.sampled_from([r"[a-f]{2,5}(-[0-9]+)?", r"(yes|no), [a-z]{1,9}!", "\u4e2d+x", "^ab?$"]),
)
def test_any_draw_under_a_regex_matches_it_as_a_whole(seed, regex):
    text = written(Structured(regex=regex), random.Random(seed))
    assert text is None or re.fullmatch(regex, text.decode())


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**9), st.lists(st.text(min_size=1, max_size=6), min_size=1, max_size=4))
def test_any_draw_of_a_choice_is_one_of_its_texts(seed, texts):
    assert written(Structured(choice=tuple(texts)), random.Random(seed)) in [
        text.encode() for text in texts
    ]


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**9))
def test_any_draw_under_a_grammar_is_derived_from_it(seed):
    text = written(Structured(grammar=LIST), random.Random(seed))
    assert text is None or re.fullmatch(rb"\[\d{1,3}(,\d{1,3})*\]", text)


def test_the_ends_of_short_outputs_are_found():
    # Otherwise the tests above would pass with outputs that never end.
    assert (
        sum(
            written(Structured(regex="[a-c]{1,9}"), random.Random(seed)) is not None
            for seed in range(20)
        )
        == 20
    )
    assert (
        sum(
            written(Structured(json_schema=PERSON), random.Random(seed)) is not None
            for seed in range(20)
        )
        >= 15
    )


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({"json_schema": "{"}, "json_schema is not JSON: Expecting property name"),
        ({"json_schema": "[1]"}, r"json_schema is \[1\], expected an object"),
        ({"json_schema": {"type": "nothing"}}, "json_schema: Invalid type: nothing"),
        ({"json_schema": {"type": "object", "if": {}}}, "json_schema: Unimplemented keys: .*if"),
        ({"regex": "(a"}, "regex: .*unclosed group"),
        ({"regex": "a(?=b)"}, "regex: .*look-ahead"),
        ({"grammar": "start: missing"}, 'grammar: .*unknown name: "missing"'),
    ],
)
def test_a_form_that_cannot_be_compiled_is_refused(form, message):
    with pytest.raises(ValueError, match=f"(?s){message}"):
        GRAMMARS.compile(Structured(**form))


def test_what_is_compiled_is_kept_within_its_bytes_and_the_oldest_is_dropped():
    grammars = GrammarCompiler(DEMO, frozenset({END}), VOCAB)
    a, b, c = (Structured(regex=letter) for letter in "abc")
    first = grammars.compile(a)
    assert grammars.compile(Structured(regex="a")) is first and first.num_bytes > 0
    del first
    running = grammars.compile(b).matcher()
    assert grammars.is_cached(a) and grammars.is_cached(b)
    grammars.cache_bytes = 1
    last = grammars.compile(c)
    # A grammar in use stays in memory after its eviction from the cache.
    assert [grammars.is_cached(each) for each in (a, b, c)] == [False, True, True]
    assert grammars.num_bytes == running.grammar.num_bytes + last.num_bytes


def chain(length):
    return (
        "".join(f'r{i}: r{i + 1} | "x{i}"\n' for i in range(length))
        + f'r{length}: "y"\nstart: r0\n'
    )


def nested(depth):
    schema = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


# 4,096 combinations.
ALTERNATIVES = [
    {
        "anyOf": [
            {"type": "object", "properties": {f"p{i}{j}": {"type": "string"}}} for i in range(4)
        ]
    }
    for j in range(6)
]
WIDE = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(1000)}}


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({"json_schema": {"allOf": ALTERNATIVES}}, "json_schema: it takes more than 0.3 s to comp"),
        (
            {"grammar": chain(50_000)},
            "grammar: it (takes more than 0.3 s|needs more than 256 MiB|is nested too deep)",
        ),
        ({"grammar": chain(2_000)}, "grammar: it is nested too deep"),
        (
            {"json_schema": WIDE},
            "json_schema: it is too complex: .*too many|json_schema: it is too complex: .*items",
        ),
        ({"json_schema": nested(200)}, "json_schema: recursion limit exceeded"),
        ({"json_schema": "[" * 100_000}, "json_schema: it is nested too deep"),
        ({"json_schema": '{"a":' * 500 + "1" + "}" * 500}, "json_schema: recursion limit exceeded"),
        ({"regex": r"[^\s\S]"}, "regex: no text matches it"),
        ({"json_schema": {"$ref": "#"}}, "json_schema: no text matches it"),
        ({"regex": "a\ud800"}, "regex: it has text that is not valid Unicode"),
        ({"choice": ("a", "\ud800")}, "choice: "),
    ],
)
def test_a_grammar_over_its_limits_is_rejected_and_others_still_compile(form, message, monkeypatch):
    # On a machine that is busy the process of low priority gets its 0.3 s of CPU late.
    monkeypatch.setattr(grammar_validator, "WALL_PER_CPU", 200)
    with pytest.raises(ValueError, match=f"^{message}"):
        SHORT_OF_TIME.compile(Structured(**form))
    assert SHORT_OF_TIME.compile(Structured(regex="ab")).matcher().accept(DEMO.token_to_id("a"))


def test_a_schema_is_read_at_each_depth_or_refused_by_a_sentence():
    """The parsers of a schema and of its grammar end at different depths."""
    refusals = set()
    for depth in range(900, 1010):
        try:
            source(Structured(json_schema='{"a":' * depth + "1" + "}" * depth))
        except ValueError as error:
            refusals.add(str(error))
    assert refusals <= {"json_schema: it is nested too deeply"}


def test_a_form_whose_masks_take_long_is_refused():
    # Each text has very many parses.
    rules = "".join(f'b{i}: "a" a\n' for i in range(300))
    ways = " | ".join(f"a b{i}" for i in range(300))
    with pytest.raises(
        ValueError, match="grammar: it is too complex: computing its masks exceeds the limit"
    ):
        GRAMMARS.compile(Structured(grammar=f'start: a*\na: {ways} | "a"\n{rules}'))


def test_a_long_text_that_a_grammar_forces_costs_no_more_than_a_short_one():
    for form in ({"regex": "(a{1000}){1000}"}, {"choice": ("a" * 200_000, "b")}):
        matcher = SHORT_OF_TIME.compile(Structured(**form)).matcher()
        assert matcher.accept(DEMO.token_to_id("a"))


def test_an_output_whose_masks_turn_out_slow_ends_and_its_neighbour_goes_on(monkeypatch):
    grammars = GrammarCompiler(DEMO, frozenset({END}), VOCAB)
    slow, other = (
        grammars.compile(Structured(regex=regex)).matcher() for regex in ("[a-z]{9}", "[0-9]{9}")
    )
    monkeypatch.setattr("atomc.runtime.constrained.grammar_compiler.SLOW_SECONDS", 0.0)
    mask = full_mask(1, grammars.vocab_size)
    grammars.fill(mask, [(slow, 0, ())])
    assert not slow.stop_reason  # known: a matcher was slow; unknown: which one
    grammars.fill(mask, [(slow, 0, ())])
    assert "exceeded the limit" in slow.error and not slow.accept(DEMO.token_to_id("a"))
    assert other.accept(DEMO.token_to_id("1"))


def test_the_validation_process_restarts_if_it_was_killed():
    grammars = GrammarCompiler(DEMO, frozenset({END}), VOCAB)
    grammars.compile(Structured(regex="a"))
    grammars._validator._server._process.kill()
    grammars._validator._server._process.wait()
    assert grammars.compile(Structured(regex="b")).matcher().accept(DEMO.token_to_id("b"))


def test_a_validation_process_that_is_stopped_is_replaced():
    grammars = GrammarCompiler(DEMO, frozenset({END}), VOCAB)
    grammars.compile(Structured(regex="a"))
    server = grammars._validator._server
    server._patience = 0.5
    os.kill(server._process.pid, signal.SIGSTOP)
    assert grammars.compile(Structured(regex="b")).matcher().accept(DEMO.token_to_id("b"))


def test_matchers_of_one_grammar_do_not_know_each_other():
    grammar = GRAMMARS.compile(Structured(regex="abc|xyz"))
    one, other = grammar.matcher(), grammar.matcher()
    assert one.accept(DEMO.token_to_id("a"))
    assert not one.accept(DEMO.token_to_id("x")) and other.accept(DEMO.token_to_id("x"))


def test_a_token_that_may_not_come_changes_nothing():
    matcher = GRAMMARS.compile(Structured(regex="abc")).matcher()
    before = may_follow(matcher)
    assert not matcher.accept(DEMO.token_to_id("x")) and not matcher.accept(END)
    assert may_follow(matcher) == before and not matcher.error
    for token in DEMO.encode("abc").ids:
        assert not matcher.complete and matcher.accept(token)
    assert matcher.complete and not matcher.finished and may_follow(matcher) == [END]
    assert matcher.accept(END) and matcher.finished and not matcher.accept(END)


def test_rows_behind_a_draft_are_as_if_its_tokens_had_come():
    grammar = GRAMMARS.compile(Structured(json_schema=PERSON))
    draft = DEMO.encode('{"name').ids
    assert len(draft) > 2
    mask, matcher = full_mask(len(draft) + 4, GRAMMARS.vocab_size), grammar.matcher()
    GRAMMARS.fill(
        mask, [(matcher, 1, draft), (grammar.matcher(), len(draft) + 2, [DEMO.token_to_id("x")])]
    )
    step = grammar.matcher()
    for row, token in enumerate([*draft, None], start=1):
        assert allowed(mask, VOCAB)[row].nonzero()[:, 0].tolist() == may_follow(step)
        assert token is None or step.accept(token)
    # Other rows are unchanged, including those after the disallowed token, and so is the matcher's
    # state.
    assert allowed(mask, VOCAB)[[0, -1]].all() and not allowed(mask, VOCAB)[-2].all()
    assert may_follow(matcher) == may_follow(grammar.matcher()) and not matcher.error


def test_rows_without_a_form_may_draw_anything():
    matcher, mask = (
        GRAMMARS.compile(Structured(choice=("yes", "no"))).matcher(),
        full_mask(2, GRAMMARS.vocab_size),
    )
    GRAMMARS.fill(mask, [(matcher, 1, ())])
    logits = torch.zeros(2, VOCAB)
    logits[:, VOCAB - 1] = 5.0
    tokens = Sampler(torch.device("cpu"), 2)(
        logits, [SampleSpec(params=SamplingParams())] * 2, mask=mask
    ).tokens.tolist()
    assert tokens[0] == VOCAB - 1 and DEMO.id_to_token(tokens[1]) in {"y", "ye", "yes", "n", "no"}


def test_a_model_without_an_end_is_refused():
    with pytest.raises(ValueError, match="needs an end-of-sequence token"):
        GrammarCompiler(DEMO, frozenset(), VOCAB)


def test_a_missing_library_is_named_with_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ImportError, match=r"llguidance.*pip install 'atomc\[serve\]'"):
        GrammarCompiler(DEMO, frozenset({END}), VOCAB)
