"""Responses: JSON, errors, server-sent events, and what a request that waits for one needs.

Errors are as in OpenAI's API. No message has a path or a stack trace.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, TypeVar
from uuid import uuid4

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from typing_extensions import TypedDict  # pydantic reads no other before Python 3.12

from atomc.runtime.requests.request_errors import RequestError, TokenizerError
from atomc.runtime.server.engines.client import (
    EngineDead,
    EngineLost,
    EngineRestarting,
    RequestRefused,
    ShuttingDown,
)

T = TypeVar("T")
SSE_DONE = b"data: [DONE]\n\n"
MAX_MESSAGE_CHARACTERS = 1000
# In place of a text: nothing else that is encoded has it.
MARK = uuid4().hex


class ErrorBody(TypedDict):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(TypedDict):
    """The body of every error response."""

    error: ErrorBody


class APIError(Exception):
    """A response with this status and the body {"error": {"message", "type", "param", "code"}}.
    kind: the type; None: by the status.
    """

    def __init__(
        self,
        status: int,
        message: str,
        kind: str | None = None,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        # The message may quote the request, which can be long or contain lone surrogates.
        message = message[:MAX_MESSAGE_CHARACTERS].encode(errors="backslashreplace").decode()
        super().__init__(message)
        self.status, self.message, self.code = status, message, code
        self.kind = kind or ("invalid_request_error" if status < 500 else "server_error")
        self.param = param and param.encode(errors="backslashreplace").decode()
        self.headers = dict(headers or {})

    def body(self) -> ErrorAnswer:
        return {
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }


def invalid(message: str, param: str | None = None, code: str | None = None) -> APIError:
    return APIError(400, message, param=param, code=code)


@contextmanager
def refusing(param: str | None = None) -> Iterator[None]:
    """A ValueError within is a 400, for this parameter or the one that a ParameterError names."""
    try:
        yield
    except UnicodeError:
        raise
    except ValueError as error:
        raise invalid(str(error), getattr(error, "name", param)) from error


def unavailable(
    message: str,
    code: str,
    retry_after: float | None = None,
    *,
    status: int = 503,
    kind: str = "service_unavailable",
) -> APIError:
    """For a request that may succeed later, after `retry_after` seconds if that is known."""
    seconds = retry_after if retry_after is None else max(1, round(retry_after))
    headers = None if seconds is None else {"Retry-After": str(seconds)}
    return APIError(status, message, kind, code=code, headers=headers)


def invalid_field(location: Sequence[str], message: str) -> APIError:
    """A 400 for a field that pydantic refused with this message. location: "" is the body."""
    # Lone surrogates become ?.
    parts = [part.encode(errors="replace").decode() for part in location]
    text = message.removeprefix("Value error, ")
    return invalid(f"{'.'.join(parts) or 'the body'}: {text}", parts[0] if parts else None)


def request_error(error: RequestError, request_id: str) -> APIError:
    """The response to a request that failed in the engine."""
    if error.by_client:
        return invalid(error.message)
    return APIError(500, f"{error.message} (request {request_id})")


def client_error(error: BaseException) -> APIError:
    """The response to a request that ended with this error."""
    match error:
        case APIError():
            return error
        case ShuttingDown():
            return unavailable(str(error), "shutting_down")
        case EngineRestarting(retry_after=seconds):
            return unavailable(str(error), "engine_restarting", seconds)
        case EngineLost():
            message = f"{error}; another engine takes over: send the request again"
            return unavailable(message, "engine_dead", 0)
        case EngineDead():
            return unavailable(f"{error}; no request can be served", "engine_dead")
        case RequestRefused(asleep=True, retry_after=float() | int() as seconds):
            return unavailable(str(error), "engine_asleep", seconds)
        case RequestRefused(retry_after=float() | int() as seconds):
            return unavailable(str(error), "queue_full", seconds, kind="overloaded")
        case RequestRefused(by_client=False):
            return APIError(500, str(error))
        case RequestRefused():
            return invalid(str(error))
        case TokenizerError():
            return APIError(500, str(error))
    return APIError(500, "internal error; see the server's log")


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


class TextEvents:
    """Server-sent events that differ in one text only: the rest is encoded once.

    event   the data of the event with a text
    """

    def __init__(self, event: Callable[[str], object]) -> None:
        self._head, self._tail = sse_event(event(MARK)).split(msgspec.json.encode(MARK))

    def encode(self, text: str) -> bytes:
        """As sse_event of its event."""
        return b"%b%b%b" % (self._head, msgspec.json.encode(text), self._tail)


class EventStream(Response):
    """Server-sent events; closes `events` and calls `close` when they end or the client
    disconnects, also if it does before the first event.

    Events go to the server's own `send`, which is in the state of the scope: the middleware needs
    the start and the end of a response only.
    """

    def __init__(self, events: AsyncIterator[bytes], close: Callable[[], None]) -> None:
        self._events, self._close = events, close
        self.status_code, self.background, self.media_type = 200, None, "text/event-stream"
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        send_event = scope.get("state", {}).get("send", send)
        try:
            with suppress(ClientDisconnect, OSError):  # of `send`, from version 2.4 of ASGI on
                await cancel_on_disconnect(Request(scope, receive), self._run(send, send_event))
        finally:
            await self._events.aclose()  # type: ignore[attr-defined]
            self._close()  # events that have not begun close nothing

    async def _run(self, send: Send, send_event: Send) -> None:
        head = {"type": "http.response.start", "status": self.status_code}
        await send(head | {"headers": self.raw_headers})
        async for event in self._events:
            await send_event({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body"})


async def cancel_on_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`. If the client disconnects, cancels it and raises ClientDisconnect.

    It is a task: each wakeup would run through the coroutines of all middleware otherwise.
    """
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
