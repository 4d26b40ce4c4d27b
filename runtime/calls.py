"""A call of an LLM: its requests, and the completions that are built of their outputs."""

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from atomc.runtime.requests.request import (
    Completion,
    FinishReason,
    Output,
    PromptImage,
    Request,
    TokenLogprobs,
)
from atomc.runtime.requests.request_errors import RequestError
from atomc.runtime.requests.sampling_params import SamplingParams
from atomc.runtime.text.text_stream import TextStream

if TYPE_CHECKING:  # optional
    from tokenizers import Tokenizer


class Query(NamedTuple):
    """One prompt of a call. lora: the name of an adapter."""

    tokens: Sequence[int]
    images: Sequence[PromptImage]
    params: SamplingParams
    lora: str | None


class CompletionBuilder:
    """Builds the Completion of one request from its outputs. Other threads may read it: when
    finish_reason is set, all else is.
    """

    def __init__(self, request: Request, tokenizer: "Tokenizer | None") -> None:
        self.request = request
        self.text = ""
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.finish_reason: FinishReason | None = None
        self.error: RequestError | None = None
        self._stream = TextStream(tokenizer, request.tokens, request.params)
        self._first: Output | None = None
        self._stop_reason: int | str | None = None

    def add(self, output: Output) -> None:
        self._first = self._first or output
        delta = self._stream.add(output)
        self.text += delta.text
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs or ()
        self.error, self._stop_reason = output.error, delta.stop_reason
        self.finish_reason = delta.finish_reason

    def fail(self, error: RequestError) -> None:
        self.error = error
        self.finish_reason = "error"

    def completion(self) -> Completion:
        assert self.finish_reason is not None
        request, first = self.request, self._first or Output(self.request.id, ())
        return Completion(
            self.text,
            tuple(self.token_ids),
            self.finish_reason,
            tuple(request.tokens[: request.num_prompt]),
            logprobs=None if request.params.logprobs is None else tuple(self.logprobs),
            prompt_logprobs=first.prompt_logprobs,
            stop_reason=self._stop_reason,
            num_cached=first.num_cached,
            error=self.error,
        )


@dataclass(eq=False)
class LLMCall:
    """The requests of one call, which are added to the engine in its first turn.

    streams    whether the caller waits for each output, not only for the last
    builders   one per request, once they are added
    num_left   unfinished requests
    error      of the call as a whole
    abandoned  whether the caller has left
    """

    queries: Sequence[Query]
    streams: bool = False
    builders: list[CompletionBuilder] = field(default_factory=list)
    error: BaseException | None = None
    abandoned: bool = False

    def __post_init__(self) -> None:
        self.num_left = sum(query.params.n for query in self.queries)

    @property
    def is_running(self) -> bool:
        return self.num_left > 0 and self.error is None and not self.abandoned

    def wake(self) -> None:
        """Let the caller look at the builders; called in any thread."""
        raise NotImplementedError

    def note(self, builder: CompletionBuilder) -> None:
        """This builder has another output, or an error."""
        if builder.finish_reason is not None:
            self.num_left -= 1
        if self.streams or not self.num_left:
            self.wake()

    def fail(self, error: BaseException) -> None:
        self.error = error
        self.wake()

    def raise_error(self) -> None:
        """Raise the error of the call as a whole, if there is one."""
        if (error := self.error) is None:
            return
        self.abandoned = True
        try:
            raise error
        finally:
            error = self.error = None  # its traceback refers to this call


@dataclass(eq=False)
class ThreadCall(LLMCall):
    """A call whose thread waits for it."""

    changed: threading.Event = field(default_factory=threading.Event)

    def wake(self) -> None:
        self.changed.set()


class AsyncCall(LLMCall):
    """A call of the running event loop."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._loop, self._changed = asyncio.get_running_loop(), asyncio.Event()

    def wake(self) -> None:
        try:
            self._loop.call_soon_threadsafe(self._changed.set)
        except RuntimeError:  # the loop is closed
            self.abandoned = True

    async def wait(self) -> None:
        """Wait until `wake` is called."""
        await self._changed.wait()
        self._changed.clear()
