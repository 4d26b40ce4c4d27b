"""Shared HTTP code: responses, server-sent events, and the middleware for request ids, API keys,
body size and errors.
"""

import asyncio
import logging
import re
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar
from urllib.parse import unquote

import msgspec
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from atomc.runtime.server.http.api_keys import ApiKeys
from atomc.runtime.server.http.errors import APIError, client_error
from atomc.runtime.server.http.web_pages import WebPages
from atomc.torch_compat.exceptions import is_failure

log = logging.getLogger("atomc.server")
T = TypeVar("T")
REQUEST_ID = re.compile(r"[\w.:/-]{1,128}", re.ASCII)
ABSOLUTE_FORM = re.compile(rb"https?://[^/?#]+(/.*)?", re.IGNORECASE | re.DOTALL)
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


def sse_event(data: object) -> bytes:
    """One server-sent event."""
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


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
        for each in (task, disconnected):
            each.cancel()
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


def _use_origin_form(scope: Scope) -> None:
    """Keep the path of a target that is a whole URL, as clients send it to a proxy (RFC 9112,
    3.2.2); uvicorn takes the URL as the path.
    """
    if match := ABSOLUTE_FORM.fullmatch(scope.get("raw_path") or b""):
        scope["raw_path"] = match[1] or b"/"
        scope["path"] = unquote(scope["raw_path"].decode("ascii"))


class AuthMiddleware:
    """ASGI middleware: assigns request ids, checks the site of web pages, API keys and body sizes,
    and turns exceptions into error responses.

    open_paths        paths that need no key
    operation_paths   paths that need an admin key, if there are any
    count_error       called with the status of each error response
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        keys: ApiKeys,
        pages: WebPages,
        open_paths: frozenset[str],
        operation_paths: frozenset[str],
        max_body_bytes: int,
        count_error: Callable[[int], None],
        error_formats: Sequence[ErrorFormat] = (),
    ) -> None:
        self.app = app
        self.keys, self.pages = keys, pages
        self.open_paths, self.operation_paths = open_paths, operation_paths
        self.max_body_bytes = max_body_bytes
        self.count_error = count_error
        self.error_formats = error_formats

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        _use_origin_form(scope)
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        name = given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        headers_of_response = {"X-Request-Id": name}
        state = scope.setdefault("state", {})
        state.update(request_id=name, headers=headers_of_response)
        for protocol in self.error_formats:
            if protocol.applies(scope["path"]):
                headers_of_response[protocol.id_header] = name
                state["error_format"] = protocol
        response_started = False

        async def send_with_id(message: Message) -> None:
            nonlocal response_started
            if message["type"] == "http.response.start":
                response_started = True
                MutableHeaders(scope=message).update(headers_of_response)
                if message["status"] >= 400:
                    self.count_error(message["status"])
            await send(message)

        try:
            scope["state"]["caller"] = self._check(scope, headers)
            await self.app(scope, self._limit_body(receive), send_with_id)
        except ClientDisconnect:
            pass
        except BaseException as error:  # a request that fails is answered, also if Rust panics
            if not is_failure(error):
                raise
            if not isinstance(error, APIError):
                log.exception("request %s failed", name)
            if not response_started:
                await APIErrorResponse(client_error(error))(scope, receive, send_with_id)

    def _check(self, scope: Scope, headers: Headers) -> int | None:
        """The number of the caller's key; None for an open path without one."""
        self.pages.check(scope, headers)
        path = scope["path"]
        caller = self.keys.caller(headers.raw)
        operates = path in self.operation_paths and not self.keys.is_admin(caller)
        if (path not in self.open_paths and caller is None) or operates:
            kind, flag = ("admin", "--admin-key") if operates else ("API", "--api-key")
            raise APIError(
                401,
                f"missing or invalid {kind} key: send one of {flag} in the header 'Authorization: "
                "Bearer KEY' or 'x-api-key: KEY'",
                code=f"invalid_{kind.lower()}_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length) > self.max_body_bytes:
            raise self._too_large()
        return caller

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
        # The rest of the body is not read, so the connection cannot be reused.
        return APIError(
            413,
            f"the body exceeds the limit of {self.max_body_bytes} bytes",
            code="body_too_large",
            headers={"Connection": "close"},
        )
