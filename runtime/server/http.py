"""What every request goes through: its id, the key, the size of its body, and errors in OpenAI's form."""

import asyncio
import logging
import re
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

import msgspec
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from atomc.runtime.server.api_keys import ApiKeys
from atomc.runtime.server.errors import APIError, to_api_error

log = logging.getLogger("atomc.server")
T = TypeVar("T")
REQUEST_ID = re.compile(r"[\w.:/-]{1,128}", re.ASCII)
SSE_DONE = b"data: [DONE]\n\n"


class JSONResponse(Response):
    """msgspec is quicker than json, and a text with half a surrogate is no surprise to it: it refuses."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return msgspec.json.encode(content)


def error_response(error: APIError) -> JSONResponse:
    return JSONResponse(error.body(), error.status, error.headers)


def sse_event(data: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


class EventStream(StreamingResponse):
    """Server-sent events; `events` is closed when the client goes away."""

    def __init__(self, events: AsyncIterator[bytes]) -> None:
        super().__init__(events, media_type="text/event-stream",
                         headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})  # fmt: skip
        self._events = events

    async def stream_response(self, send: Send) -> None:
        try:
            await super().stream_response(send)
        finally:
            await self._events.aclose()  # type: ignore[attr-defined]


async def cancel_on_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """What the work gives. Cancels it and raises ClientDisconnect when the client goes away."""
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnect(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect()
        return task.result()
    finally:
        for each in (task, gone):
            each.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await task


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def request_id(request: Request) -> str:
    """The client's X-Request-Id, or one of ours."""
    return str(request.scope["state"]["request_id"])


class AuthMiddleware:
    """ASGI middleware: gives each request its id, and refuses those without a key or with too large a body.

    open_paths  need no key
    """

    def __init__(self, app: ASGIApp, *, keys: ApiKeys, open_paths: frozenset[str], max_body_bytes: int,
                 count_error: Callable[[int], None]) -> None:  # fmt: skip
        self.app = app
        self.keys = keys
        self.open_paths = open_paths
        self.max_body_bytes = max_body_bytes
        self.count_error = count_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        name = given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = name
        response_started = False

        async def send_with_id(message: Message) -> None:
            nonlocal response_started
            if message["type"] == "http.response.start":
                response_started = True
                MutableHeaders(scope=message)["X-Request-Id"] = name
                if message["status"] >= 400:
                    self.count_error(message["status"])
            await send(message)

        try:
            self._check(scope["path"], headers)
            await self.app(scope, self._limit_body(receive), send_with_id)
        except ClientDisconnect:
            pass
        except Exception as error:
            if not isinstance(error, APIError):
                log.exception("request %s failed", name)
            if not response_started:
                await error_response(to_api_error(error))(scope, receive, send_with_id)

    def _check(self, path: str, headers: Headers) -> None:
        if path not in self.open_paths and not self.keys.authorizes(headers.raw):
            raise APIError(401, "no valid API key: send the header 'Authorization: Bearer KEY'", code="invalid_api_key",
                           headers={"WWW-Authenticate": "Bearer"})  # fmt: skip
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length) > self.max_body_bytes:
            raise self._too_large()

    def _limit_body(self, receive: Receive) -> Callable[[], Awaitable[Message]]:
        seen = 0

        async def receive_limited() -> Message:
            nonlocal seen
            message = await receive()
            if message["type"] == "http.request":
                seen += len(message.get("body", b""))
                if seen > self.max_body_bytes:
                    raise self._too_large()
            return message

        return receive_limited

    def _too_large(self) -> APIError:
        # The rest of the body is not read, so the connection cannot serve another request.
        return APIError(413, f"the body is larger than {self.max_body_bytes} bytes", code="body_too_large",
                        headers={"Connection": "close"})  # fmt: skip
