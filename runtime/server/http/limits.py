"""Limits of one request. docs/security.md lists them."""

from collections.abc import Iterable, Sized

from atomc.files.json_types import JSON
from atomc.runtime.server.http.responses import invalid

# Fields of one object of the API.
FIELDS = 128
# Lengths of lists.
MESSAGES = 2**12
CONTENT_BLOCKS = 2**11
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


def check_total_size(
    num_choices: int, logprobs: int | None, num_tokens: int, max_len: int, param: str
) -> None:
    """Raises a 400 for too many log-probabilities, or prompt tokens, of all choices."""
    if num_choices * (logprobs or 0) > LOGPROBS:
        raise invalid(
            f"{logprobs} log-probabilities per token in {num_choices} choices exceed the limit of "
            f"{LOGPROBS} (log-probabilities times choices)",
            "logprobs",
        )
    limit = max(PROMPT_TOKENS, max_len)
    if num_tokens > limit:
        raise invalid(
            f"the prompts of all choices have {num_tokens} tokens, at most {limit} are allowed in "
            "one request: split the request",
            param,
        )


def check_fields(value: JSON) -> JSON:
    """Raises ValueError for an object with too many fields, which would be slow to list."""
    if isinstance(value, dict) and len(value) > FIELDS:
        raise ValueError(f"the object has {len(value)} fields, at most {FIELDS} are allowed")
    return value
