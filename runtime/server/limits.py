"""How much one request may ask for, at most. docs/serving.md has the table."""

from collections.abc import Iterable, Sized
from typing import Any

from atomc.runtime.server.errors import invalid

# Of a body: JSON values (or tokens of the longest sequence, twice, if these are more), lists and objects in each other,
# and fields of one object of the API.
JSON_VALUES = 2**18
JSON_DEPTH = 128
FIELDS = 128
# Lists.
MESSAGES = 4096
TOOLS = 128
STOPS = 32
STOP_CHARACTERS = 256
STOP_TOKENS = 1024
BIASED_TOKENS = 1024
CHOICES = 1024
# Characters of a schema, a regular expression, a grammar, or of all choices.
FORM_CHARACTERS = 2**18
# Over all answers of a request.
LOGPROBS = 512
PROMPT_TOKENS = 2**20
# Of /tokenize and /detokenize, or those of the longest sequence if these are more.
TOKENS = 2**17


def at_most(most: int, value: Sized | None, param: str, what: str) -> None:
    """Raises a 400 for a list that is longer."""
    if value is not None and len(value) > most:
        raise invalid(f"{param} has {len(value)} {what}, and at most {most} are allowed", param)


def check_stops(stops: Iterable[str]) -> None:
    for stop in stops:
        if len(stop) > STOP_CHARACTERS:
            raise invalid(f"stop has a text of {len(stop)} characters, and at most {STOP_CHARACTERS} are allowed", "stop")


def check_form(text: str | Iterable[str] | None, param: str) -> None:
    """Raises a 400 for a description of structured output that is too long."""
    length = len(text) if isinstance(text, str) else sum(map(len, text or ()))
    if length > FORM_CHARACTERS:
        raise invalid(f"{param} has {length} characters, and at most {FORM_CHARACTERS} are allowed", param)


def check_answers(num_answers: int, logprobs: int | None, num_tokens: int, longest: int, param: str) -> None:
    """Raises a 400 for log-probabilities and tokens of prompts that are too many over all answers."""
    if num_answers * (logprobs or 0) > LOGPROBS:
        raise invalid(f"the request asks for {logprobs} log-probabilities a token in {num_answers} answers: answers times "
                      f"log-probabilities may be at most {LOGPROBS}", "logprobs")  # fmt: skip
    most = max(PROMPT_TOKENS, longest)
    if num_tokens > most:
        raise invalid(f"the prompts of all answers have {num_tokens} tokens, and one request may have at most {most}: "
                      "send several", param)  # fmt: skip


BLOCK = 2**16


def check_json(body: bytes, longest: int) -> None:
    """Raises a 400 for a body with so many values, or so deep, that everybody would wait for its parser."""
    most = max(JSON_VALUES, 2 * longest)
    num_opening = body.count(b"[") + body.count(b"{")
    if num_opening <= JSON_DEPTH and num_opening + body.count(b",") <= most:
        return
    # Without what is between quotes. A text that is not JSON may be counted wrongly: the parser refuses it.
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in body else body
    inside, num_values, brackets = 0, 0, b""
    for start in range(0, len(plain), BLOCK):
        parts = plain[start : start + BLOCK].split(b'"')
        outside = b"".join(parts[inside::2])
        inside ^= (len(parts) - 1) & 1
        brackets += outside.translate(None, delete=NO_BRACKETS)
        num_values += outside.count(b",") + outside.count(b"[") + outside.count(b"{")
        if num_values > most:
            raise invalid(f"the body has more than {most} JSON values: send less in one request, or texts instead of token "
                          "ids")  # fmt: skip
    if len(brackets) > JSON_DEPTH and _depth(brackets) > JSON_DEPTH:
        raise invalid(f"the body is nested deeper than {JSON_DEPTH} lists and objects in each other")


NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


def _depth(brackets: bytes) -> int:
    depth = deepest = 0
    for byte in brackets:
        depth += 1 if byte in b"[{" else -1
        deepest = max(deepest, depth)
    return deepest


def check_fields(value: Any) -> Any:
    """Raises ValueError for an object with so many fields that to name the unknown ones would take long."""
    if isinstance(value, dict) and len(value) > FIELDS:
        raise ValueError(f"the object has {len(value)} fields, and at most {FIELDS} are allowed")
    return value
