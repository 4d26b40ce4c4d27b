"""Objects of JSON schemas are closed, but where that would forbid what the schema allows."""

import copy
import json

import pytest

from atomc.runtime.constrained.closed_schema import close_objects

A, B = {"properties": {"a": {"type": "integer"}}}, {"properties": {"b": {"type": "integer"}}}
CLOSED_A, CLOSED_B = A | {"additionalProperties": False}, B | {"additionalProperties": False}


def closed(schema):
    found = copy.deepcopy(schema)
    close_objects(found)
    return found


CLOSED = {
    "object": (A, CLOSED_A),
    "patterns": (
        {"patternProperties": {"^x": {}}},
        {"patternProperties": {"^x": {}}, "additionalProperties": False},
    ),
    "in properties": ({"additionalProperties": A}, {"additionalProperties": CLOSED_A}),
    "items": ({"items": A}, {"items": CLOSED_A}),
    "items by place": ({"prefixItems": [A, {}]}, {"prefixItems": [CLOSED_A, {}]}),
    "alternatives": ({"anyOf": [A, {"type": "null"}]}, {"anyOf": [CLOSED_A, {"type": "null"}]}),
    "one part": ({"allOf": [A], "title": "T"}, {"allOf": [CLOSED_A], "title": "T"}),
    "definitions": (
        {"$ref": "#/$defs/a~1b", "$defs": {"a/b": A}},
        {"$ref": "#/$defs/a~1b", "$defs": {"a/b": CLOSED_A}},
    ),
    "patterns of a name": (
        {"properties": {"p": A}, "patternProperties": {"^p": B}},
        {"properties": {"p": A}, "patternProperties": {"^p": B}, "additionalProperties": False},
    ),
    "other parts of parts": (
        {"allOf": [{"properties": {"p": A}}, {"properties": {"q": A}}]},
        {"allOf": [{"properties": {"p": CLOSED_A}}, {"properties": {"q": CLOSED_A}}]},
    ),
    "parts of alternatives": (
        {"properties": {"c": {}}, "oneOf": [{"properties": {"p": A}}, {"properties": {"p": B}}]},
        {
            "properties": {"c": {}},
            "oneOf": [{"properties": {"p": CLOSED_A}}, {"properties": {"p": CLOSED_B}}],
        },
    ),
    "a property named properties": (
        {"properties": {"properties": A}},
        {"properties": {"properties": CLOSED_A}, "additionalProperties": False},
    ),
}


@pytest.mark.parametrize(("schema", "expected"), CLOSED.values(), ids=CLOSED)
def test_an_object_has_only_the_properties_that_its_schema_names(schema, expected):
    assert closed(schema) == expected


OPEN = {
    "no names": {"type": "object"},
    "says so": A | {"additionalProperties": True},
    "others have a schema": A | {"additionalProperties": {"type": "string"}},
    "unevaluated": A | {"unevaluatedProperties": False},
    "parts": {"allOf": [A, B]},
    "a part beside": {"allOf": [A]} | B,
    "a reference beside": {"$ref": "#/$defs/a", "$defs": {"a": A}} | B,
    "a reference to a reference": {
        "allOf": [{"$ref": "#/$defs/x"}, B],
        "$defs": {"x": {"$ref": "#/$defs/y"}, "y": A},
    },
    "alternatives beside": {"oneOf": [A, B], "properties": {"c": {}}},
    "conditions": {"if": A, "then": B},
    "dependent": {"dependentSchemas": {"a": B}} | A,
    "not": {"not": A},
    "a value": {"const": A, "enum": [A], "default": A},
    "requires another": A | {"required": ["b"]},
    "parts of parts": {"allOf": [{"properties": {"p": A}}, {"properties": {"p": B}}]},
    "items of parts": {"allOf": [{"items": A}, {"items": B}]},
    "parts of references": {
        "$ref": "#/$defs/p",
        "$defs": {"p": {"properties": {"p": A}}},
        "properties": {"p": B},
    },
    "parts with patterns": {"allOf": [{"properties": {"p": A}}, {"patternProperties": {"^p": B}}]},
    "an anchor": {"allOf": [{"$ref": "#x"}, B], "$defs": {"x": {"$anchor": "x"} | A}},
    "an address": {"allOf": [{"$ref": "s.json#/$defs/x"}, B], "$id": "http://h/s.json"}
    | {"$defs": {"x": A}},
    "no schema": {"properties": 3, "allOf": 4, "required": 5, "items": [6], "$ref": "#/x/1"},
}


@pytest.mark.parametrize("schema", OPEN.values(), ids=OPEN)
def test_what_is_not_an_object_with_all_its_names_stays_as_it_is(schema):
    found = closed(schema)
    found.pop("additionalProperties", None) if "no schema" in str(schema) else None
    assert found == schema


def test_references_in_a_circle_end():
    schema = {"$ref": "#/$defs/a", "$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}, A]}}}
    assert closed(schema) == schema


def test_references_in_a_circle_with_common_properties_end():
    names = {name: {"properties": {"p": {"$ref": f"#/$defs/{name}"}}} for name in "ab"}
    schema = {"allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}], "$defs": names}
    assert closed(schema) == schema


def test_a_grammar_closes_unless_it_is_asked_not_to():
    pytest.importorskip("llguidance")
    from llguidance import LLMatcher, LLTokenizer

    from atomc.runtime.constrained.grammar_source import source
    from atomc.runtime.requests.sampling_params import Structured

    tokenizer = LLTokenizer("byte")
    text = json.dumps({"a": 1, "b": 2}, separators=(",", ":"))
    for is_open in (False, True):
        _, grammar = source(Structured(json_schema=A, additional_properties=is_open))
        matcher = LLMatcher(tokenizer, grammar)
        assert (matcher.validate_tokens(tokenizer.tokenize_str(text)) > 6) == is_open
