"""Converts structured output requests to llguidance grammars, and sets llguidance's limits."""

import json
import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from atomc.files.json_types import JSONObject
from atomc.runtime.constrained.closed_schema import as_list, close_objects, walk
from atomc.runtime.requests.sampling_params import Structured

if TYPE_CHECKING:  # optional
    from llguidance import LLParserLimits

# Tokens that a text forces are found by the mask, too. llguidance would tokenize the text: added
# tokens and Unicode normal forms make of it tokens whose bytes contradict the grammar.
BY_MASK = '%llguidance {"no_forcing": true}'
JSON_RULE = re.compile(r"^(\w+: %json )(.*)$", re.MULTILINE)
# Keywords of which null is a value: any JSON value is.
ANY_VALUE = ("const", "default")


def parser_limits() -> "LLParserLimits":
    """Limits per step. llguidance's defaults are four to five times higher and allow steps of 200
    ms, which delay all requests. Typical schemas need a hundredth of these limits."""
    from llguidance import LLParserLimits

    return LLParserLimits(step_lexer_fuel=50_000, step_max_items=10_000, max_lexer_states=50_000)


def source(structured: Structured) -> tuple[str, str]:
    """The name of the field that is set, and llguidance's grammar. Raises ValueError for an invalid
    schema.
    """
    from llguidance import LLMatcher as of

    if structured.regex is not None:
        return "regex", _unforced(of.grammar_from_regex(structured.regex))
    if structured.choice is not None:
        regex = "|".join(map(_literal, structured.choice))
        return "choice", _unforced(of.grammar_from_regex(regex))
    if structured.grammar is not None:
        if structured.grammar.lstrip().startswith("{"):
            return "grammar", structured.grammar
        return "grammar", f"{_adapted_rules(structured)}\n{BY_MASK}"
    if structured.json_object:
        return "json_object", _json_grammar({"type": "object"})
    try:
        return "json_schema", _schema_grammar(structured)
    except RecursionError as error:
        raise ValueError("json_schema: it is nested too deeply") from error


def _schema_grammar(structured: Structured) -> str:
    schema = _adapted_schema(str(structured.json_schema), structured)
    try:
        return _json_grammar(schema)
    except ValueError as error:  # such as a lone surrogate
        raise ValueError(f"json_schema: {error}") from error


def _adapted_schema(text: str, structured: Structured) -> JSONObject:
    try:
        schema = json.loads(text)
    except ValueError as error:
        raise ValueError(f"json_schema is not JSON: {error}") from error
    if not isinstance(schema, dict):
        raise ValueError(f"json_schema is {schema!r:.100}, expected an object")
    _adapt_keywords(schema, _knows_format)
    if not structured.additional_properties:
        close_objects(schema)
    _check_num_properties(schema)
    return schema


def _adapted_rules(structured: Structured) -> str:
    """The grammar; if it says so, with the schemas of its rules as those of json_schema are."""
    if not structured.adapts_schemas:
        return str(structured.grammar)

    def adapted(rule: re.Match[str]) -> str:
        schema = _adapted_schema(rule[2], structured)
        schema.setdefault("x-guidance", {"whitespace_flexible": False})
        return f"{rule[1]}{json.dumps(schema)}"

    return JSON_RULE.sub(adapted, str(structured.grammar))


def _json_grammar(schema: JSONObject) -> str:
    """Without white space between JSON tokens, of which a small model tends to generate much. A
    schema can override this with "x-guidance".
    """
    from llguidance import LLMatcher

    grammar = LLMatcher.grammar_from_json_schema(schema, defaults={"whitespace_flexible": False})
    return _unforced(grammar)


def _unforced(grammar: str) -> str:
    """The grammar, in llguidance's JSON form, with the option BY_MASK."""
    (grammar_fields,) = json.loads(grammar)["grammars"]
    start = {"lark_grammar": f"{BY_MASK}\nstart: @root"}
    return json.dumps({"grammars": [start, {**grammar_fields, "name": "root"}]})


def _knows_format(name: str) -> bool:
    from llguidance import LLMatcher

    schema: JSONObject = {"type": "string", "format": name}
    return not LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(schema))


def _literal(text: str) -> str:
    """A regular expression that matches this text."""
    return "".join(c if c.isascii() and c.isalnum() else f"\\x{{{ord(c):x}}}" for c in text)


def _adapt_keywords(schema: JSONObject, knows_format: Callable[[str], bool]) -> None:
    """Remove from each schema, in place, null, which some clients send for a keyword that is not
    set, and the formats that llguidance does not know: a format is an annotation.
    """
    for node in list(walk(schema)):
        for name, value in list(node.items()):
            unset = value is None and name not in ANY_VALUE
            if unset or (name == "format" and isinstance(value, str) and not knows_format(value)):
                del node[name]


def _check_num_properties(schema: JSONObject) -> None:
    """Raises ValueError for an object that could have fewer properties than minProperties:
    llguidance counts a name that the output repeats twice, unless the schema names it.
    """
    for node in walk(schema):
        least, required = node.get("minProperties"), node.get("required")
        if not isinstance(least, int) or not _has_unnamed(node):
            continue
        names = {name for name in as_list(required) if isinstance(name, str)}
        if least > len(names) + 1:
            raise ValueError(
                f"json_schema: minProperties is {least}, expected at most {len(names) + 1} (one "
                "more than the required properties) in an object whose other properties are not "
                "named in `properties`"
            )


def _has_unnamed(node: JSONObject) -> bool:
    """Whether an object may have properties that the schema does not name."""
    return bool(node.get("patternProperties")) or node.get("additionalProperties") is not False
