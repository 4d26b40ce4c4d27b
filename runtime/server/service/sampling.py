"""Converts a request body to SamplingParams, and to the tokens of its prompts, which OpenAI's API
allows in several forms.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from atomc.runtime.constrained.allowed_tokens import bad_word_tokens
from atomc.runtime.requests.sampling_params import SamplingParams, Structured, truncated
from atomc.runtime.server.config import ServerConfig
from atomc.runtime.server.http.limits import (
    BAD_WORDS,
    CHOICES,
    GRAMMAR_CHARACTERS,
    STOP_STRINGS,
    STOP_TOKENS,
    TOKENS,
    check_constraint_size,
    check_length,
    check_stop_strings,
    check_total_size,
)
from atomc.runtime.server.http.responses import invalid, refusing
from atomc.runtime.server.service.model_info import ModelInfo
from atomc.runtime.server.service.protocol import GenerationRequest, ResponseFormat
from atomc.runtime.server.service.service import Service

Prompts = str | list[int] | list[str] | list[list[int]]
DEFAULT_TEMPERATURE = 1.0
SHARED_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)


async def sampling_params(
    body: GenerationRequest,
    model: ModelInfo,
    *,
    num_choices: int,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
    structured: Structured | None,
    skip_special_tokens: bool,
    thinking_token_budget: int | None,
    thinking_is_open: bool | None = None,
) -> SamplingParams:
    """The request's values, else the model's defaults, else OpenAI's. Raises a 400 for values out
    of range.

    num_choices   of all prompts
    """
    check_length(STOP_TOKENS, body.stop_token_ids, "stop_token_ids", "tokens")
    stop_token_ids = tuple(body.stop_token_ids or ())
    model.check_tokens(stop_token_ids, "stop_token_ids")
    model.check_tokens(tuple(body.logit_bias or ()), "logit_bias")
    values: dict[str, Any] = {"temperature": DEFAULT_TEMPERATURE, **model.defaults}
    values |= {name: value for name in SHARED_FIELDS if (value := getattr(body, name)) is not None}
    # vLLM's -1 means all tokens; here that is 0.
    values["top_k"] = (
        max(values.get("top_k", 0), 0) if values.get("top_k", 0) >= -1 else values["top_k"]
    )
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    check_length(STOP_STRINGS, stop, "stop", "strings")
    check_stop_strings(stop)
    if stop and model.tokenizer is None:
        raise invalid(
            "this model has no tokenizer, so stop strings cannot be found: use stop_token_ids",
            "stop",
        )
    allowed = _allowed_token_ids(body, model, num_choices)
    bad_words = await _bad_words(body, model, num_choices)
    with refusing():
        return SamplingParams(
            max_tokens=max_tokens,
            min_tokens=body.min_tokens,
            seed=body.seed,
            stop=stop,
            stop_token_ids=stop_token_ids,
            include_stop_str_in_output=body.include_stop_str_in_output,
            ignore_eos=body.ignore_eos,
            logit_bias=body.logit_bias or {},
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            structured=structured,
            skip_special_tokens=skip_special_tokens,
            allowed_token_ids=allowed,
            bad_words=bad_words,
            thinking_token_budget=thinking_token_budget,
            thinking_is_open=thinking_is_open,
            **values,
        )


def _allowed_token_ids(
    body: GenerationRequest, model: ModelInfo, num_choices: int
) -> tuple[int, ...] | None:
    name, ids = "allowed_token_ids", body.allowed_token_ids
    if ids is None:
        return None
    check_constraint_size(name, len(ids), "tokens", num_choices)
    model.check_tokens(ids, name)
    return tuple(ids)


async def _bad_words(
    body: GenerationRequest, model: ModelInfo, num_choices: int
) -> tuple[tuple[int, ...], ...]:
    """As token ids: the engine does not tokenize."""
    name, words = "bad_words", body.bad_words
    if not words:
        return ()
    check_length(BAD_WORDS, words, name, "strings")
    check_constraint_size(name, sum(map(len, words)), "characters", num_choices)
    if not all(word.strip() for word in words):
        raise invalid(f"{name} has an empty or blank string, expected words: remove it", name)
    with refusing(name):
        return await asyncio.to_thread(bad_word_tokens, words, model.tokenizer)


def truncated_prompt(
    tokens: Sequence[int], body: GenerationRequest, max_tokens: int | None, model: ModelInfo
) -> list[int]:
    """The end of the prompt that truncate_prompt_tokens keeps. Raises a 400 for a wrong value."""
    with refusing():
        return truncated(
            tokens, body.truncate_prompt_tokens, max_tokens=max_tokens, max_len=model.max_len
        )


def prompt_limit(body: GenerationRequest, model: ModelInfo) -> int:
    """How many tokens a prompt may have before it is truncated."""
    return model.max_len if body.truncate_prompt_tokens is None else max(TOKENS, model.max_len)


def check_context_length(num_prompt: int, max_tokens: int | None, model: ModelInfo) -> None:
    """Raises a 400 if prompt and new tokens together exceed max_len."""
    num_available = model.max_len - num_prompt
    num_requested = 1 if max_tokens is None else max_tokens
    if num_requested > num_available:
        least = "at least " if max_tokens is None else ""
        raise invalid(
            f"this model's maximum context length is {model.max_len} tokens, and the request has "
            f"{num_prompt} in the prompt and asks for {least}{num_requested} more: shorten the "
            "prompt or reduce max_tokens",
            "max_tokens" if num_prompt < model.max_len else "prompt",
            "context_length_exceeded",
        )


def additional_properties(body: GenerationRequest, config: ServerConfig) -> bool:
    """Whether objects of the request's JSON schemas may have properties that these do not name."""
    outputs = body.structured_outputs
    if outputs is None or outputs.disable_additional_properties is None:
        return config.additional_properties
    return not outputs.disable_additional_properties


def structured_output(
    body: GenerationRequest, response_format: ResponseFormat | None, config: ServerConfig
) -> Structured | None:
    """The requested structured output, from any of the fields that can request it, or None."""
    requested: list[Mapping[str, Any]] = []
    for one in _structured_outputs(body, response_format):
        if one not in requested:  # clients for all versions of vLLM send old and new fields
            requested.append(one)
    if not requested:
        return None
    try:
        if len(requested) > 1:
            raise ValueError(
                "the request has several kinds of structured output, expected one: "
                f"{', '.join(sorted({key for one in requested for key in one}))}"
            )
        check_length(CHOICES, requested[0].get("choice"), "choice", "strings")
        is_open = additional_properties(body, config)
        return check_structured(Structured(**requested[0], additional_properties=is_open))
    except (ValueError, TypeError) as error:
        raise invalid(
            str(error), "response_format" if response_format else "structured_outputs"
        ) from error


def check_structured(structured: Structured) -> Structured:
    """Returns its argument. Raises a 400 for a schema, grammar, ... that is too long."""
    for name in ("json_schema", "regex", "choice", "grammar"):
        value = getattr(structured, name)
        text = str(value) if name == "json_schema" else "".join(value or ())
        check_length(GRAMMAR_CHARACTERS, text, name, "characters")
    return structured


def _structured_outputs(
    body: GenerationRequest, response_format: ResponseFormat | None
) -> Sequence[Mapping[str, Any]]:
    requested: list[dict[str, Any]] = []
    if response_format is not None and response_format.type == "json_object":
        requested.append({"json_object": True})
    elif response_format is not None and response_format.type == "json_schema":
        if response_format.json_schema is None:
            raise invalid(
                "response_format 'json_schema' needs a field json_schema: {name, schema}",
                "response_format",
            )
        schema = response_format.json_schema.schema_
        requested.append({"json_object": True} if schema is None else {"json_schema": schema})
    if (outputs := body.structured_outputs) is not None:
        kinds = outputs.kinds()
        if kinds or outputs.disable_additional_properties is None:
            requested.append(kinds)
    for name in ("json", "regex", "choice", "grammar"):
        if (value := getattr(body, f"guided_{name}")) is not None:
            requested.append({"json_schema" if name == "json" else name: value})
    return requested


def check_logprobs(body: GenerationRequest, param: str, config: ServerConfig) -> None:
    """Raises a 400 for more log-probabilities than --max-logprobs, of this parameter or of the
    prompt, and for those of the prompt in a stream, which has no place for them.
    """
    for name in (param, "prompt_logprobs"):
        number = getattr(body, name)
        if number is not None and not 0 <= number <= config.max_logprobs:
            raise invalid(
                f"{name} is {number}, it must be at least 0 and at most {config.max_logprobs}", name
            )
    if body.prompt_logprobs is not None and body.stream:
        raise invalid(
            "prompt_logprobs are not available in a stream: leave out stream, or prompt_logprobs",
            "prompt_logprobs",
        )


# Prompts


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
