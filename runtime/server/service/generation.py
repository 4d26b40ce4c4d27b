"""Generates the choices of one HTTP request, `n` per prompt, with usage, metrics and a log line. An
Answer turns them into one JSON body, or a stream of events.
"""

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Generic, ParamSpec, Self, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from atomc.runtime.requests.request import Output, PromptImage, TokenLogprobs
from atomc.runtime.requests.request_errors import RequestError, wrap_error
from atomc.runtime.requests.sampling_params import SamplingParams
from atomc.runtime.server.engines.client import RequestRefused
from atomc.runtime.server.engines.ipc import Submit
from atomc.runtime.server.engines.request_stream import RequestStream
from atomc.runtime.server.http.responses import (
    APIError,
    EventStream,
    JSONResponse,
    cancel_on_disconnect,
    client_error,
    request_error,
    request_id,
    sse_event,
)
from atomc.runtime.server.service.protocol import GenerationRequest, SamplingFields
from atomc.runtime.server.service.response_types import PromptTokensDetails, Usage
from atomc.runtime.server.service.service import Service
from atomc.runtime.text.text_stream import TextDelta, TextStream
from atomc.torch_compat.exceptions import is_failure

log = logging.getLogger("atomc.requests")
P = ParamSpec("P")
T = TypeVar("T")
Body = TypeVar("Body", bound=SamplingFields)


@dataclass
class Choice:
    """One choice in progress. first, last: time.monotonic of its first and last token."""

    index: int
    prompt: Sequence[int]
    stream: TextStream
    num_new: int = 0
    num_cached: int = 0
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    finish_reason: str | None = None
    first: float = 0.0
    last: float = 0.0
    queue_seconds: float = 0.0


@dataclass(frozen=True)
class RequestSummary:
    """What the log and the traces tell of a request that has ended.

    num_prompt, num_cached, num_new   tokens of all choices; a prompt with several counts once
    queue_seconds                     the longest time of a choice in the engine's queue
    ttft_seconds                      until the first token of any choice; None: there was none
    error                             the code of what ended the request early, or "disconnect"
    """

    request_id: str
    params: SamplingParams
    num_choices: int
    num_prompt: int
    num_cached: int
    num_new: int
    queue_seconds: float
    ttft_seconds: float | None
    seconds: float
    finish_reasons: tuple[str, ...]
    error: str | None


class Generation:
    """`await start()`, then iterate in a `with` block, which closes it.

    Choice i * n + j is number j of prompt i. images: of the only prompt. Raises a 404 for a model
    that is not served.
    """

    def __init__(
        self,
        service: Service,
        request: Request,
        body: GenerationRequest,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        images: Sequence[PromptImage] = (),
    ) -> None:
        model, engines = service.model, service.engines
        model.check_name(body.model)  # again: an adapter may have been unloaded since then
        lora, salt = model.adapter(body.model), service.prefix_salt(request, body.cache_salt)
        self.service, self.request, self.params = service, request, params
        self.request_id = request_id(request)
        self.n, self.prompts = body.n, prompts
        self.model_name = lora or model.names[0]
        self._image_tokens = sum(image.length for image in images)
        self.choices: dict[str, Choice] = {}
        self._submits: list[Submit] = []
        for number, prompt in enumerate(prompts):
            group = engines.next_id()
            for offset in range(self.n):
                submit = Submit(
                    f"{group}/{offset}",
                    list(prompt),
                    _choice_params(params, offset),
                    body.priority,
                    salt,
                    images=tuple(images),
                    lora=lora,
                )
                self._submits.append(submit)
                stream = self._run_isolated(TextStream, model.tokenizer, prompt, params)
                self.choices[submit.id] = Choice(number * self.n + offset, prompt, stream)
        self._request_stream: RequestStream | None = None
        self.started = time.monotonic()
        self._closed = False

    async def start(self) -> None:
        """Returns when the engine has accepted all. Raises RequestRefused, APIError if the engine
        failed, EngineDead, or ClientDisconnect.
        """
        try:
            await cancel_on_disconnect(self.request, self._submit())
        except BaseException as error:  # cancelled too: the engine may have the request already
            self.close(None if isinstance(error, ClientDisconnect) else error)
            raise

    async def _submit(self) -> None:
        self._request_stream = self.service.engines.submit(self._submits)
        self._submits = []  # they hold the images
        try:
            await self._request_stream.wait_accepted()
            await self.service.turns.take()  # many are accepted at once
        except RequestRefused as refused:
            if refused.by_client:
                raise
            log.error("request %s failed: %s", self.request_id, refused)
            raise request_error(RequestError(str(refused)), self.request_id) from refused

    async def __aiter__(self) -> AsyncIterator[tuple[Choice, TextDelta]]:
        """Yields (choice, new text) until all choices have finished. Raises EngineDead, or APIError
        if one failed.
        """
        assert self._request_stream is not None, "start() comes first"
        async for output in self._request_stream:
            choice, metrics = self.choices[output.request_id], self.service.metrics
            if output.finish_reason is not None:
                self._raise_error(output)
            before, choice.last = choice.last, time.monotonic()
            if choice.num_new:
                metrics.observe("inter_token_latency_seconds", choice.last - before)
            else:
                choice.first, choice.num_cached = choice.last, output.num_cached
                choice.prompt_logprobs = output.prompt_logprobs
                metrics.observe_ttft(choice.last - self.started)
                choice.queue_seconds = output.queue_seconds
                metrics.observe("request_queue_time_seconds", choice.queue_seconds)
            delta = self._run_isolated(choice.stream.add, output)
            choice.num_new += len(delta.token_ids)
            choice.finish_reason = delta.finish_reason
            if delta.finish_reason is not None:
                if output.finish_reason is None:  # a stop string, which the engine does not check
                    self._request_stream.close(output.request_id)
                self._record_metrics(choice)
            yield choice, delta

    def _raise_error(self, output: Output) -> None:
        """Raises APIError for an output that ends its request without tokens."""
        if output.error is not None:
            if not output.error.by_client:
                log.error(
                    "request %s failed (%s in the engine): %s",
                    self.request_id,
                    output.request_id,
                    output.error.message,
                )
            raise request_error(output.error, self.request_id)
        if output.finish_reason == "abort":
            raise APIError(500, "the engine aborted this request")

    def usage(self) -> Usage:
        """Token counts in OpenAI's format; a prompt with several choices counts once."""
        prompt = sum(len(prompt) for prompt in self.prompts)
        new = sum(choice.num_new for choice in self.choices.values())
        num_cached = sum(
            choice.num_cached for choice in self.choices.values() if choice.index % self.n == 0
        )
        details: PromptTokensDetails = {"cached_tokens": num_cached}
        if self._image_tokens:
            details["image_tokens"] = self._image_tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": new,
            "total_tokens": prompt + new,
            "prompt_tokens_details": details,
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(error)

    def close(self, error: BaseException | None = None) -> None:
        """Aborts unfinished choices and logs the request, with the error that ended it, if any."""
        if self._closed:
            return
        self._closed = True
        if self._request_stream is not None:
            self._request_stream.close()
        summary = self._summary(error)
        if self.service.config.log_requests:
            log.info(
                "request %s: prompt %d, cached %d, new %d, ttft %s, seconds %.3f, finish %s",
                summary.request_id,
                summary.num_prompt,
                summary.num_cached,
                summary.num_new,
                "-" if summary.ttft_seconds is None else f"{summary.ttft_seconds:.3f}",
                summary.seconds,
                "+".join(summary.finish_reasons),
            )
        if (traces := self.service.traces) is not None:
            traces.record(summary, self.request.headers, self.model_name)

    def _summary(self, error: BaseException | None) -> RequestSummary:
        choices, usage = self.choices.values(), self.usage()
        first = min((choice.first for choice in choices if choice.first), default=None)
        ended = "disconnect"
        if error is not None and is_failure(error):
            ended = client_error(error).code or "error"
        return RequestSummary(
            self.request_id,
            self.params,
            num_choices=len(choices),
            num_prompt=usage["prompt_tokens"],
            num_cached=usage["prompt_tokens_details"]["cached_tokens"],
            num_new=usage["completion_tokens"],
            queue_seconds=max((choice.queue_seconds for choice in choices), default=0.0),
            ttft_seconds=None if first is None else first - self.started,
            seconds=time.monotonic() - self.started,
            finish_reasons=tuple(sorted({choice.finish_reason or ended for choice in choices})),
            error=None if all(choice.finish_reason for choice in choices) else ended,
        )

    def _run_isolated(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The result of `work`. Raises APIError if it fails."""
        try:
            return work(*args, **kwargs)
        except BaseException as error:  # a panic in Rust is no Exception
            failed = wrap_error(self.request_id, "detokenizing", error)
            raise request_error(failed, self.request_id) from error

    def _record_metrics(self, choice: Choice) -> None:
        metrics = self.service.metrics
        metrics.observe("e2e_request_latency_seconds", choice.last - self.started)
        waited = choice.first - self.started - choice.queue_seconds
        metrics.observe("request_prefill_time_seconds", max(waited, 0.0))
        metrics.observe("request_decode_time_seconds", choice.last - choice.first)
        metrics.observe("request_prompt_tokens", len(choice.prompt))
        metrics.observe("request_generation_tokens", choice.num_new)
        metrics.finished.labels(metrics.model, choice.finish_reason).inc()
        if choice.num_new > 1:
            mean = (choice.last - choice.first) / (choice.num_new - 1)
            metrics.observe("request_time_per_output_token_seconds", mean)


def _choice_params(params: SamplingParams, number: int) -> SamplingParams:
    """With a seed for each choice of a prompt: with the same one, all would be equal."""
    return (
        params
        if params.seed is None or number == 0
        else replace(params, seed=(params.seed + number) % 2**63)
    )


class Answer(ABC, Generic[Body]):
    """An API implements `complete`, one JSON body, and `events`, server-sent events; both run while
    the generation is open.
    """

    def __init__(self, body: Body, generation: Generation) -> None:
        self.body, self.generation = body, generation
        self.service, self.request = generation.service, generation.request
        self.request_id, self.created = generation.request_id, int(time.time())

    @abstractmethod
    async def complete(self) -> object: ...

    @abstractmethod
    def events(self) -> AsyncIterator[bytes]: ...

    def failure(self, error: APIError) -> bytes:
        """The last events of a stream that this error ends."""
        return sse_event(error.body())

    async def respond(self) -> Response:
        if self.body.stream:
            return EventStream(self._stream(), self.generation.close)
        return JSONResponse(await cancel_on_disconnect(self.request, self._complete()))

    async def _complete(self) -> object:
        with self.generation:
            return await self.complete()

    async def _stream(self) -> AsyncIterator[bytes]:
        try:
            with self.generation:
                async for event in self.events():
                    yield event
        except Exception as error:  # the response has begun: its last event says what failed
            yield self.failure(self.service.stream_error(error))
