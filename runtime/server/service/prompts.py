"""Tokenizes the prompts of a request, in each form that OpenAI's API allows."""

from collections.abc import Callable, Sequence
from typing import Any

from atomc.runtime.server.http.limits import check_total_size
from atomc.runtime.server.http.responses import invalid
from atomc.runtime.server.service.service import Service

Prompts = str | list[int] | list[str] | list[list[int]]


async def tokenize_prompts(
    service: Service,
    prompts: Prompts,
    param: str,
    add_special_tokens: bool = True,
    *,
    n: int = 1,
    logprobs: int | None = None,
    limit: int | None = None,
    truncate: Callable[[list[int]], list[int]] | None = None,
) -> list[list[int]]:
    """The tokens of each prompt.

    n, logprobs   choices per prompt and log-probabilities per token, for the limits
    limit         maximum number of tokens of a text; None: max_len
    truncate      what is left of each prompt

    Raises a 400 for an empty list, an empty prompt, a prompt longer than max_len, an unknown token
    id, and for too many choices, tokens or log-probabilities.
    """
    is_single = isinstance(prompts, str) or (prompts and isinstance(prompts[0], int))
    separate: Sequence[Any] = [prompts] if is_single else prompts
    model = service.model
    check_num_choices(service, len(separate) * n, param)
    # Before tokenizing, so that a request over this limit costs no time.
    check_total_size(len(separate) * n, logprobs, 0, model.max_len, param)
    tokens = list(separate)
    if tokens and isinstance(tokens[0], str):
        tokens = await model.encode(tokens, add_special_tokens, param=param, limit=limit)
    if not tokens or not all(tokens):
        raise invalid(f"{param} is empty, it needs at least one token", param)
    if truncate is not None:
        tokens = [truncate(one) for one in tokens]
    check_total_size(len(tokens) * n, logprobs, n * sum(map(len, tokens)), model.max_len, param)
    for one in tokens:
        model.check_tokens(one, param)
    return tokens


def check_num_choices(service: Service, number: int, param: str) -> None:
    """Raises a 400 for more choices than the queue holds."""
    if number > service.max_requests:
        raise invalid(
            f"the request asks for {number} choices, the queue holds at most "
            f"{service.max_requests}",
            param,
        )
