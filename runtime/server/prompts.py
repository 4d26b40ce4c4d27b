"""The prompts of a request, in any of the forms that OpenAI's API allows, as tokens."""

from collections.abc import Sequence
from typing import Any

from atomc.runtime.server.errors import invalid
from atomc.runtime.server.service import Service

Prompts = str | list[int] | list[str] | list[list[int]]


async def prompt_tokens(service: Service, given: Prompts, param: str, add_special_tokens: bool = True) -> list[list[int]]:
    """The tokens of each prompt. Raises a 400 for none at all, an empty one, and tokens that do not exist."""
    several: Sequence[Any] = [given] if isinstance(given, str) or (given and isinstance(given[0], int)) else given
    model = service.model
    tokens = [await model.encoded(one, add_special_tokens) if isinstance(one, str) else one for one in several]
    if not tokens or not all(tokens):
        raise invalid(f"{param} is empty, it needs at least one token", param)
    for one in tokens:
        model.check_tokens(one, param)
    return tokens


def check_number(service: Service, number: int, param: str) -> None:
    """Raises a 400 for more answers than one request may ask for."""
    if number > service.max_requests:
        raise invalid(f"the request asks for {number} answers, and {service.max_requests} is what the queue holds", param)
