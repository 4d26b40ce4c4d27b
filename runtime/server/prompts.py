"""The prompts of a request, in any of the forms that OpenAI's API allows, as tokens."""

from collections.abc import Sequence
from typing import Any

from atomc.runtime.server.errors import invalid
from atomc.runtime.server.limits import check_answers
from atomc.runtime.server.service import Service

Prompts = str | list[int] | list[str] | list[list[int]]


async def prompt_tokens(
    service: Service, given: Prompts, param: str, add_special_tokens: bool = True, *, n: int = 1,
    logprobs: int | None = None,
) -> list[list[int]]:  # fmt: skip
    """The tokens of each prompt, which gets n answers with so many log-probabilities a token.

    Raises a 400 for no prompt at all, an empty one, one longer than the longest sequence, tokens that do not exist, and
    for too many answers, tokens or log-probabilities.
    """
    several: Sequence[Any] = [given] if isinstance(given, str) or (given and isinstance(given[0], int)) else given
    model = service.model
    check_number(service, len(several) * n, param)
    # Texts first, so that nothing is tokenized for a request that asks for too much besides.
    check_answers(len(several) * n, logprobs, 0, model.max_len, param)
    tokens = list(several)
    if tokens and isinstance(tokens[0], str):
        tokens = await model.encode(tokens, add_special_tokens, param=param)
    if not tokens or not all(tokens):
        raise invalid(f"{param} is empty, it needs at least one token", param)
    check_answers(len(tokens) * n, logprobs, n * sum(map(len, tokens)), model.max_len, param)
    for one in tokens:
        model.check_tokens(one, param)
    return tokens


def check_number(service: Service, number: int, param: str) -> None:
    """Raises a 400 for more answers than one request may ask for."""
    if number > service.max_requests:
        raise invalid(f"the request asks for {number} answers, and {service.max_requests} is what the queue holds", param)
