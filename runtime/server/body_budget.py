"""Bytes of bodies that requests under way have sent, all together."""

import asyncio
import ctypes
from contextlib import suppress

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from atomc.runtime.server.errors import APIError

RETRY_SECONDS = 1
# After a larger body memory goes back to the system; glibc would keep it.
LARGE = 2**20
TRIM_SECONDS = 1.0


class BodyBudget:
    """ASGI middleware: a request whose body would bring all of them above `most` bytes gets a 429."""

    def __init__(self, app: ASGIApp, most: int) -> None:
        self.app = app
        self.most = most
        self.held = 0
        self._trimming = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        held = received = 0

        async def counted() -> Message:
            nonlocal held, received
            message = await receive()
            size = len(message.get("body", b""))
            if self.held + size > self.most:
                error = self._too_much()
                # At once, so that no other request is refused because of this one.
                self.held -= held
                held = 0
                raise error
            held += size
            received += size
            self.held += size
            return message

        try:
            await self.app(scope, counted, send)
        finally:
            self.held -= held
            if received > LARGE and not self._trimming:
                self._trimming = True
                asyncio.get_running_loop().call_later(TRIM_SECONDS, self._trim)

    def _trim(self) -> None:
        self._trimming = False
        asyncio.get_running_loop().run_in_executor(None, _give_memory_back)

    def _too_much(self) -> APIError:
        # The rest of the body is not read, so the connection cannot serve another request.
        return APIError(429, f"the bodies of all requests under way have {self.held} bytes, and at most {self.most} are "
                        "taken: try again later", "overloaded", code="too_many_bytes",
                        headers={"Retry-After": str(RETRY_SECONDS), "Connection": "close"})  # fmt: skip


def _give_memory_back() -> None:
    with suppress(AttributeError, OSError):  # another C library than glibc
        ctypes.CDLL(None).malloc_trim(0)
