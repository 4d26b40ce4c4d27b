"""Responses: JSON, errors, server-sent events, and what a request that waits for one needs."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from atomc.runtime.server.http.errors import APIError

T = TypeVar("T")
SSE_DONE = b"data: [DONE]\n\n"


class JSONResponse(Response):
    """Encoded by msgspec: faster than json, and it raises an error for lone surrogates."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return msgspec.json.encode(content)


class ErrorFormat(NamedTuple):
    """How a protocol beside OpenAI's renders errors.

    path        of its API; also that of all paths below
    body        the error and the request's id -> the body
    id_header   the header in which all its responses have the request's id
    """

    path: str
    body: Callable[[APIError, str], object]
    id_header: str

    def applies(self, path: str) -> bool:
        return path == self.path or path.startswith(f"{self.path}/")


class APIErrorResponse(JSONResponse):
    """In OpenAI's format, or in that of the protocol of the path."""

    def __init__(self, error: APIError) -> None:
        super().__init__(error.body(), error.status, error.headers)
        self._error = error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state, error = scope.get("state", {}), self._error
        protocol: ErrorFormat | None = state.get("error_format")
        if protocol is None:
            return await super().__call__(scope, receive, send)
        body = protocol.body(error, state["request_id"])
        await JSONResponse(body, error.status, error.headers)(scope, receive, send)


def sse_event(data: object, name: str = "") -> bytes:
    """One server-sent event."""
    head = f"event: {name}\n" if name else ""
    return b"%bdata: %b\n\n" % (head.encode(), msgspec.json.encode(data))


class EventStream(StreamingResponse):
    """Server-sent events; closes `events` and calls `close` when they end or the client
    disconnects, also if it does before the first event.
    """

    def __init__(self, events: AsyncIterator[bytes], close: Callable[[], None]) -> None:
        super().__init__(
            events,
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
        )
        self._events, self._close = events, close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._events.aclose()  # type: ignore[attr-defined]
            self._close()  # events that have not begun close nothing


async def cancel_on_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`. If the client disconnects, cancels it and raises ClientDisconnect."""
    task = asyncio.create_task(work)
    disconnected = asyncio.create_task(_wait_disconnect(request))
    try:
        await asyncio.wait({task, disconnected}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect()
        return task.result()
    finally:
        for waiting in (task, disconnected):
            waiting.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await task


async def _wait_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def request_id(request: Request) -> str:
    """The client's X-Request-Id, or a generated one."""
    return str(request.scope["state"]["request_id"])


def response_headers(request: Request) -> dict[str, str]:
    """Headers that the response gets; more can be set until it starts."""
    headers: dict[str, str] = request.scope["state"]["headers"]
    return headers
