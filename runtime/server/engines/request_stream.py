"""The outputs of requests, from the engine's client to the endpoint that reads them."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import replace

from atomc.runtime.requests.request import Output


class RequestStream:
    """Outputs of a group of requests, for one reader.

    Unread outputs of a request are merged, so a slow reader neither blocks the engine nor lets a
    queue grow.

    abort   aborts requests of these ids; finished ones are ignored
    """

    def __init__(self, ids: Sequence[str], abort: Callable[[Iterable[str]], None]) -> None:
        self._abort = abort
        self._unfinished = set(ids)
        self._not_accepted = set(ids)
        self._pending: dict[str, Output | _MergedOutput] = {}
        self._accepted = asyncio.Event()
        self._reader: asyncio.Future[None] | None = None  # done when there is something to read
        self._error: Exception | None = None

    async def wait_accepted(self) -> None:
        """Returns when the engine has accepted all requests. Raises EngineDead, or RequestRefused
        (all are aborted).
        """
        await self._accepted.wait()
        if self._error is not None:
            raise self._error

    async def __aiter__(self) -> AsyncIterator[Output]:
        """New outputs, merged per request, until all requests have finished. Raises EngineDead."""
        while self._unfinished:
            if not self._pending and self._error is None:
                self._reader = asyncio.get_running_loop().create_future()
                await self._reader
            if self._error is not None and not self._pending:
                raise self._error
            pending, self._pending = self._pending, {}
            for request_id, part in pending.items():
                # The reader may have closed this request since.
                if request_id in self._unfinished:
                    output = part if isinstance(part, Output) else part.output()
                    if output.finish_reason is not None:
                        self._unfinished.discard(request_id)
                    yield output

    def close(self, request_id: str | None = None) -> None:
        """Abort one request, or all unfinished ones."""
        ids = list(self._unfinished) if request_id is None else [request_id]
        self._unfinished.difference_update(ids)
        self._abort(ids)

    def accept(self, request_id: str) -> None:
        self._not_accepted.discard(request_id)
        if not self._not_accepted:
            self._accepted.set()

    def put(self, output: Output) -> None:
        part = self._pending.get(output.request_id)
        if isinstance(part, Output):
            part = self._pending[output.request_id] = _MergedOutput(part)
        if part is None:
            self._pending[output.request_id] = output
        else:
            part.add(output)
        self._wake()

    def fail(self, error: Exception) -> None:
        self._error = self._error or error
        self._abort(self._unfinished)
        self._accepted.set()
        self._wake()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


class _MergedOutput:
    """Consecutive outputs of one request, merged into one."""

    def __init__(self, first: Output) -> None:
        self.first = self.last = first
        self.token_ids = list(first.token_ids)
        self.logprobs = list(first.logprobs or ())

    def add(self, output: Output) -> None:
        self.last = output
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs or ()

    def output(self) -> Output:
        """What is only in the first output comes from it, the end from the last one."""
        return replace(
            self.first,
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self.logprobs) or None,
            finish_reason=self.last.finish_reason,
            stop_reason=self.last.stop_reason,
            error=self.last.error,
        )
