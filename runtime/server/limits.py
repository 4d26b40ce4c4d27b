"""Limits of one request. docs/serving.md lists them."""

from collections.abc import Iterable, Sized

from atomc.json_types import JSON
from atomc.runtime.server.errors import invalid

# JSON values of a body (at least twice max_len), nesting depth, and fields of one API object.
JSON_VALUES = 2**18
JSON_DEPTH = 128
FIELDS = 128
# Lengths of lists.
MESSAGES = 4096
CONTENT_BLOCKS = 2**14
TOOLS = 128
STOP_STRINGS = 32
STOP_CHARACTERS = 256
STOP_TOKENS = 1024
BIASED_TOKENS = 1024
BAD_WORDS = 1024
# allowed_token_ids, and characters of bad_words, times the choices of a request.
CONSTRAINT_SIZE = 2**18
CHOICES = 1024
# Characters of a JSON schema, a regular expression, a grammar, or of all choices together.
GRAMMAR_CHARACTERS = 2**18
# Summed over all choices of a request.
LOGPROBS = 512
PROMPT_TOKENS = 2**20
# Of /tokenize and /detokenize; at least max_len.
TOKENS = 2**17


def check_length(limit: int, value: Sized | None, param: str, items: str) -> None:
    """Raises a 400 for a longer list."""
    if value is not None and len(value) > limit:
        raise invalid(f"{param} has {len(value)} {items}, at most {limit} are allowed", param)


def check_stop_strings(stop_strings: Iterable[str]) -> None:
    for stop in stop_strings:
        if len(stop) > STOP_CHARACTERS:
            raise invalid(
                f"stop has a string of {len(stop)} characters, at most {STOP_CHARACTERS} are "
                "allowed",
                "stop",
            )


def check_constraint_size(param: str, size: int, items: str, num_choices: int) -> None:
    """Raises a 400 for a list that is too long for this number of choices: each has a copy."""
    if size * num_choices > CONSTRAINT_SIZE:
        raise invalid(
            f"{param} has {size} {items}, at most {CONSTRAINT_SIZE // num_choices} are allowed for "
            f"{num_choices} choices: send fewer, or split the request",
            param,
        )


def check_grammar_length(text: str | Iterable[str] | None, param: str) -> None:
    """Raises a 400 for a schema, regular expression, grammar or list of choices that is too
    long.
    """
    length = len(text) if isinstance(text, str) else sum(map(len, text or ()))
    if length > GRAMMAR_CHARACTERS:
        raise invalid(
            f"{param} has {length} characters, at most {GRAMMAR_CHARACTERS} are allowed", param
        )


def check_total_size(
    num_choices: int, logprobs: int | None, num_tokens: int, max_len: int, param: str
) -> None:
    """Raises a 400 if all choices together have too many log-probabilities per token, or too many
    prompt tokens.
    """
    if num_choices * (logprobs or 0) > LOGPROBS:
        raise invalid(
            f"{logprobs} log-probabilities per token in {num_choices} choices exceed the limit "
            f"of {LOGPROBS} "
            "(log-probabilities times choices)",
            "logprobs",
        )
    limit = max(PROMPT_TOKENS, max_len)
    if num_tokens > limit:
        raise invalid(
            f"the prompts of all choices have {num_tokens} tokens, at most {limit} are allowed "
            "in one request: "
            "split the request",
            param,
        )


COUNT_BYTES = 2**16


def check_json(body: bytes, max_len: int) -> None:
    """Raises a 400 for a body with too many values or too deep a nesting: parsing it would block
    the event loop.
    """
    limit = max(JSON_VALUES, 2 * max_len)
    num_opening = body.count(b"[") + body.count(b"{")
    if num_opening <= JSON_DEPTH and num_opening + body.count(b",") <= limit:
        return
    # Count outside of strings only. The count of a body that is not JSON may be wrong; the parser
    # refuses it.
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in body else body
    inside, num_values, brackets = 0, 0, b""
    for start in range(0, len(plain), COUNT_BYTES):
        parts = plain[start : start + COUNT_BYTES].split(b'"')
        outside = b"".join(parts[inside::2])
        inside ^= (len(parts) - 1) & 1
        brackets += outside.translate(None, delete=NOT_BRACKETS)
        num_values += outside.count(b",") + outside.count(b"[") + outside.count(b"{")
        if num_values > limit:
            raise invalid(
                f"the body has more than {limit} JSON values: split the request, or send text, "
                "not token ids"
            )
    if len(brackets) > JSON_DEPTH and _depth(brackets) > JSON_DEPTH:
        raise invalid(f"the body has more than {JSON_DEPTH} levels of nested lists and objects")


NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


def _depth(brackets: bytes) -> int:
    depth = deepest = 0
    for byte in brackets:
        depth += 1 if byte in b"[{" else -1
        deepest = max(deepest, depth)
    return deepest


def check_fields(value: JSON) -> JSON:
    """Raises ValueError for an object with too many fields: listing the unknown ones would be
    slow.
    """
    if isinstance(value, dict) and len(value) > FIELDS:
        raise ValueError(f"the object has {len(value)} fields, at most {FIELDS} are allowed")
    return value
