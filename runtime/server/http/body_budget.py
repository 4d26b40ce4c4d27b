"""Limits the total size of the bodies of running requests."""

import asyncio
import ctypes
from contextlib import suppress

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from atomc.runtime.server.http.errors import APIError

RETRY_SECONDS = 1
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

        async def receive_counted() -> Message:
            nonlocal bytes_held, received
            message = await receive()
            size = len(message.get("body", b""))
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


def _trim_heap() -> None:
    with suppress(AttributeError, OSError):  # another C library than glibc
        ctypes.CDLL(None).malloc_trim(0)
