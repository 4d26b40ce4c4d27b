"""Limits the total size of the bodies of running requests."""

import asyncio
import ctypes
from contextlib import suppress

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from atomc.runtime.server.errors import APIError

RETRY_SECONDS = 1
# A rejected client that still sends gets this long to read the response before the connection is
# closed.
LINGER_SECONDS = 1.0
# Above this body size, return freed memory to the operating system, which glibc would otherwise
# keep.
TRIM_BYTES = 2**20
TRIM_SECONDS = 1.0


class BodyBudgetMiddleware:
    """ASGI middleware: responds with a 429 to a request whose body would bring the total above
    `max_bytes`.
    """

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self.app = app
        self.max_bytes = max_bytes
        self.bytes_held = 0
        self._trimming = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        bytes_held = received = 0
        rejected = False

        async def receive_counted() -> Message:
            nonlocal bytes_held, received, rejected
            message = await receive()
            size = len(message.get("body", b""))
            if self.bytes_held + size > self.max_bytes:
                error = self._over_budget()
                # Release now, so that no other request is rejected because of this one.
                self.bytes_held -= bytes_held
                bytes_held = 0
                rejected = True
                raise error
            bytes_held += size
            received += size
            self.bytes_held += size
            return message

        async def send_and_linger(message: Message) -> None:
            if (
                not rejected
                or message["type"] != "http.response.body"
                or message.get("more_body", False)
            ):
                await send(message)
                return
            await send({**message, "more_body": True})
            await _discard(receive)
            await send({"type": "http.response.body"})

        try:
            await self.app(scope, receive_counted, send_and_linger)
        finally:
            self.bytes_held -= bytes_held
            if received > TRIM_BYTES and not self._trimming:
                self._trimming = True
                asyncio.get_running_loop().call_later(TRIM_SECONDS, self._trim)

    def _trim(self) -> None:
        self._trimming = False
        asyncio.get_running_loop().run_in_executor(None, _trim_heap)

    def _over_budget(self) -> APIError:
        # The rest of the body is not read, so the connection cannot be reused.
        return APIError(
            429,
            f"the bodies of all running requests have {self.bytes_held} bytes, the limit is "
            f"{self.max_bytes}: try again later",
            "overloaded",
            code="too_many_bytes",
            headers={"Retry-After": str(RETRY_SECONDS), "Connection": "close"},
        )


async def _discard(receive: Receive) -> None:
    """Reads the rest of a body for a while: closing with unread data resets the connection, which
    can lose the response.
    """
    with suppress(TimeoutError):
        async with asyncio.timeout(LINGER_SECONDS):
            while (await receive()).get("more_body", False):
                pass


def _trim_heap() -> None:
    with suppress(AttributeError, OSError):  # another C library than glibc
        ctypes.CDLL(None).malloc_trim(0)
