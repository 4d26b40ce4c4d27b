"""Middleware for the bodies of requests: their total size, the time in which one must arrive, and
what is left of one when its request is refused.
"""

import asyncio
import ctypes
from contextlib import suppress
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from atomc.runtime.server.http.responses import APIError

RETRY_SECONDS = 1
# Above this body size, return freed memory to the operating system, which glibc would otherwise
# keep.
TRIM_BYTES = 2**20
TRIM_SECONDS = 1.0
# A body at this speed or faster never times out.
MIN_BYTES_PER_SECOND = 10_000
# A client that still sends has this long to read the response before the connection is closed.
LINGER_SECONDS = 1.0


@dataclass
class BodyBudgetMiddleware:
    """ASGI middleware: a 413 for a body of more than `max_body_bytes`, and a 429 for one that would
    bring the total above `max_bytes`.
    """

    app: ASGIApp
    max_body_bytes: int
    max_bytes: int
    bytes_held: int = 0
    _trimming: bool = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        length = Headers(scope=scope).get("content-length", "0")
        if length.isdecimal() and int(length) > self.max_body_bytes:
            raise self._too_large()
        bytes_held = received = 0

        async def receive_counted() -> Message:
            nonlocal bytes_held, received
            message = await receive()
            size = len(message.get("body", b""))
            if received + size > self.max_body_bytes:
                raise self._too_large()
            if self.bytes_held + size > self.max_bytes:
                error = self._over_budget()
                # Release now, so that no other request is rejected because of this one.
                self.bytes_held -= bytes_held
                bytes_held = 0
                raise error
            bytes_held += size
            received += size
            self.bytes_held += size
            return message

        try:
            await self.app(scope, receive_counted, send)
        finally:
            self.bytes_held -= bytes_held
            if received > TRIM_BYTES and not self._trimming:
                self._trimming = True
                asyncio.get_running_loop().call_later(TRIM_SECONDS, self._trim)

    def _trim(self) -> None:
        self._trimming = False
        asyncio.get_running_loop().run_in_executor(None, _trim_heap)

    # The rest of the body is not read, so the connection cannot be reused.

    def _too_large(self) -> APIError:
        return APIError(
            413,
            f"the body exceeds the limit of {self.max_body_bytes} bytes",
            code="body_too_large",
            headers={"Connection": "close"},
        )

    def _over_budget(self) -> APIError:
        return APIError(
            429,
            f"the bodies of all running requests have {self.bytes_held} bytes, the limit is "
            f"{self.max_bytes}: try again later",
            "overloaded",
            code="too_many_bytes",
            headers={"Retry-After": str(RETRY_SECONDS), "Connection": "close"},
        )


def _trim_heap() -> None:
    with suppress(AttributeError, OSError):  # another C library than glibc
        ctypes.CDLL(None).malloc_trim(0)


@dataclass
class BodyTimeoutMiddleware:
    """ASGI middleware: responds with a 408 if the body is not complete after `seconds`, plus one
    second for every MIN_BYTES_PER_SECOND received."""

    app: ASGIApp
    seconds: float

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        loop = asyncio.get_running_loop()
        deadline: float | None = None
        complete = False

        async def receive_timed() -> Message:
            nonlocal deadline, complete
            if complete:  # the next message is http.disconnect
                return await receive()
            deadline = deadline or loop.time() + self.seconds
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                # The rest of the body is not read, so the connection cannot be reused.
                raise APIError(
                    408,
                    "timed out waiting for the body of the request",
                    code="body_timeout",
                    headers={"Connection": "close"},
                ) from None
            deadline += len(message.get("body", b"")) / MIN_BYTES_PER_SECOND
            complete = not message.get("more_body", False)
            return message

        await self.app(scope, receive_timed, send)


@dataclass
class UnreadBodyMiddleware:
    """ASGI middleware: a response with `Connection: close` ends when the body was read, which is
    dropped, or after LINGER_SECONDS. Closing a connection with unread data resets it, and the
    client can lose the response.
    """

    app: ASGIApp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        complete = closes = False

        async def receive_noted() -> Message:
            nonlocal complete
            message = await receive()
            complete = not message.get("more_body", False)
            return message

        async def discard() -> None:
            with suppress(TimeoutError, APIError):  # the body itself may time out
                async with asyncio.timeout(LINGER_SECONDS):
                    while not complete:
                        await receive_noted()

        async def send_after_body(message: Message) -> None:
            nonlocal closes
            if message["type"] == "http.response.start":
                closes = Headers(raw=message["headers"]).get("connection") == "close"
            ends = message["type"] == "http.response.body" and not message.get("more_body", False)
            if complete or not (closes and ends):
                await send(message)
                return
            await send({**message, "more_body": True})
            await discard()
            await send({"type": "http.response.body"})

        await self.app(scope, receive_noted, send_after_body)
