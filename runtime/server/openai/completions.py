"""POST /v1/completions."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from atomc.runtime.requests.request import TokenLogprobs
from atomc.runtime.server.http.responses import SSE_DONE, TextEvents, invalid, sse_event
from atomc.runtime.server.service import response_types as types
from atomc.runtime.server.service.generation import Answer, Choice, Generation
from atomc.runtime.server.service.logprobs import (
    TextOffsets,
    completion_logprobs,
    encoded,
    prompt_logprobs,
)
from atomc.runtime.server.service.protocol import CompletionRequest
from atomc.runtime.server.service.sampling import (
    check_context_length,
    check_logprobs,
    prompt_limit,
    sampling_params,
    structured_output,
    tokenize_prompts,
    truncated_prompt,
)
from atomc.runtime.server.service.service import Service
from atomc.runtime.text.text_stream import TextDelta

MAX_TOKENS = 16  # OpenAI's default
# Log-probabilities of more tokens are formatted in a thread.
THREAD_TOKENS = 128


@dataclass
class CompletionDelta:
    """What is new of one choice.

    new_tokens       the tokens without those of an echoed prompt
    openai_logprobs  the log-probabilities so far, as the API returns them
    """

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    new_tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    openai_logprobs: types.CompletionLogprobs | None = None


async def complete(service: Service, body: CompletionRequest, request: Request) -> Response:
    """Complete prompts."""
    model = service.model
    model.check_name(body.model)
    if body.suffix:
        raise invalid("suffix is not supported: the server does not insert text", "suffix")
    if body.best_of not in (None, 1) and body.best_of != body.n:
        raise invalid(f"best_of={body.best_of} is not supported: use n", "best_of")
    check_logprobs(body, "logprobs", service.config)
    max_tokens = MAX_TOKENS if body.max_tokens is None else body.max_tokens
    prompts = await tokenize_prompts(
        service,
        body.prompt,
        "prompt",
        body.add_special_tokens,
        n=body.n,
        logprobs=max(body.logprobs or 0, body.prompt_logprobs or 0),
        limit=prompt_limit(body, model),
        truncate=partial(truncated_prompt, body=body, max_tokens=max_tokens, model=model),
    )
    for prompt in prompts:
        check_context_length(len(prompt), max_tokens, model)
    # A request for the prompt log-probabilities only, as evaluations send, still computes one
    # token.
    prompt_only = max_tokens == 0 and body.echo
    params = await sampling_params(
        body,
        model,
        num_choices=len(prompts) * body.n,
        max_tokens=1 if prompt_only else max_tokens,
        logprobs=body.logprobs,
        prompt_logprobs=body.logprobs
        if body.echo and body.prompt_logprobs is None
        else body.prompt_logprobs,
        structured=structured_output(body, body.response_format, service.config),
        skip_special_tokens=body.skip_special_tokens,
        thinking_token_budget=body.thinking_token_budget,
    )
    generation = Generation(service, request, body, prompts, params)
    await generation.start()
    return await CompletionAnswer(body, generation, prompt_only).respond()


class CompletionAnswer(Answer[CompletionRequest]):
    """An Answer as a text completion."""

    def __init__(self, body: CompletionRequest, generation: Generation, prompt_only: bool) -> None:
        super().__init__(body, generation)
        self.prompt_only = prompt_only
        self.offsets = {
            choice.index: TextOffsets(self.service.model, body.skip_special_tokens)
            for choice in generation.choices.values()
        }

    def _response(self, choices: list[types.CompletionChoice]) -> types.Completion:
        return {
            "id": f"cmpl-{self.request_id}",
            "object": "text_completion",
            "created": self.created,
            "model": self.generation.model_name,
            "choices": choices,
        }

    async def complete(self) -> types.Completion:
        parts = {choice.index: CompletionDelta() for choice in self.generation.choices.values()}
        texts: dict[int, list[str]] = {index: [] for index in parts}
        async for choice, delta in self.generation:
            part, new = parts[choice.index], await self._part(choice, delta)
            texts[choice.index].append(new.text)
            part.new_tokens += new.new_tokens
            if (logprobs := await self._logprobs(choice.index, new)) is not None:
                # Encoded per delta: encoding all of them at the end would block the event loop.
                logprobs["top_logprobs"] = [*encoded(logprobs["top_logprobs"])]
                if part.openai_logprobs is None:
                    part.openai_logprobs = logprobs
                else:
                    _extend(part.openai_logprobs, logprobs)
            part.finish_reason, part.stop_reason = new.finish_reason, new.stop_reason
        for index, part in parts.items():
            part.text = "".join(texts[index])
        choices = [
            _choice(index, part, part.openai_logprobs) for index, part in sorted(parts.items())
        ]
        if self.body.return_token_ids:
            for choice in self.generation.choices.values():
                choices[choice.index]["prompt_token_ids"] = choice.prompt
                choices[choice.index]["token_ids"] = parts[choice.index].new_tokens
        if self.body.prompt_logprobs is not None:
            for choice in self.generation.choices.values():
                choices[choice.index]["prompt_logprobs"] = await asyncio.to_thread(
                    prompt_logprobs, self.service.model, choice.prompt_logprobs or ()
                )
        return self._response(choices) | {"usage": self._usage()}

    def _usage(self) -> types.Usage:
        usage = self.generation.usage()
        if self.prompt_only:  # the client did not ask for the token that was computed
            usage |= {"completion_tokens": 0, "total_tokens": usage["prompt_tokens"]}
        return usage

    async def events(self) -> AsyncIterator[bytes]:
        texts = self._text_events()
        async for choice, delta in self.generation:
            if delta.finish_reason is None and texts:
                yield texts[choice.index].encode(delta.text)
            elif event := await self._event(choice, delta):
                yield event
        if self.body.effective_stream_options.include_usage:
            yield sse_event(self._response([]) | {"usage": self._usage()})
        yield SSE_DONE

    def _text_events(self) -> dict[int, TextEvents]:
        """By choice, if its events have text only until it ends."""
        body = self.body
        if (
            body.echo
            or body.logprobs is not None
            or body.return_token_ids
            or body.effective_stream_options.continuous_usage_stats
        ):
            return {}

        def events(index: int) -> TextEvents:
            chunk = _choice(index, CompletionDelta(), None)
            return TextEvents(lambda text: self._response([{**chunk, "text": text}]))

        return {index: events(index) for index in self.offsets}

    async def _event(self, choice: Choice, delta: TextDelta) -> bytes:
        """The event of a delta; empty if nothing is new."""
        part = await self._part(choice, delta)
        if not (part.tokens or part.text or part.finish_reason):
            return b""
        entry = _choice(choice.index, part, await self._logprobs(choice.index, part))
        if self.body.return_token_ids:
            entry["token_ids"] = part.new_tokens
            if choice.num_new == len(part.new_tokens):
                entry["prompt_token_ids"] = choice.prompt
        chunk = self._response([entry])
        if self.body.effective_stream_options.continuous_usage_stats:
            chunk["usage"] = self._usage()
        return sse_event(chunk)

    async def _part(self, choice: Choice, delta: TextDelta) -> CompletionDelta:
        """The new part of a choice; the first one includes the prompt if `echo` is set."""
        new = CompletionDelta(
            delta.text,
            list(delta.token_ids),
            list(delta.token_ids),
            list(delta.logprobs or ()),
            delta.finish_reason,
            delta.stop_reason,
        )
        if self.prompt_only:
            new = CompletionDelta(finish_reason="length" if delta.finish_reason else None)
        if self.body.echo and choice.num_new == len(delta.token_ids):
            new.text = await self._echo_text(choice) + new.text
            new.tokens = [*choice.prompt, *new.tokens]
            new.logprobs = [*(choice.prompt_logprobs or ()), *new.logprobs]
        return new

    async def _echo_text(self, choice: Choice) -> str:
        prompt = self.body.prompt
        texts = [prompt] if isinstance(prompt, str) else prompt
        text = texts[choice.index // self.generation.n]
        return (
            text
            if isinstance(text, str) and self.body.truncate_prompt_tokens is None
            else await self.service.model.decode(choice.prompt, skip_special_tokens=True)
        )

    async def _logprobs(self, index: int, part: CompletionDelta) -> types.CompletionLogprobs | None:
        """Log-probabilities of `part`, in OpenAI's format; many are formatted in a thread. None if
        the request asks for none.
        """
        if self.body.logprobs is None:
            return None
        args = (self.service.model, part.tokens, part.logprobs, self.offsets[index])
        if len(part.tokens) > THREAD_TOKENS:
            return await asyncio.to_thread(completion_logprobs, *args)
        return completion_logprobs(*args)


def _choice(
    index: int, part: CompletionDelta, logprobs: types.CompletionLogprobs | None
) -> types.CompletionChoice:
    return {
        "index": index,
        "text": part.text,
        "logprobs": logprobs,
        "finish_reason": part.finish_reason,
        "stop_reason": part.stop_reason,
    }


def _extend(logprobs: types.CompletionLogprobs, new: types.CompletionLogprobs) -> None:
    """Append the new items."""
    logprobs["tokens"] += new["tokens"]
    logprobs["token_logprobs"] += new["token_logprobs"]
    logprobs["top_logprobs"] += new["top_logprobs"]
    logprobs["text_offset"] += new["text_offset"]
