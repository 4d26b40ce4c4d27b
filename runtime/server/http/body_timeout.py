"""Limits the time in which a request must send its body."""

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from atomc.runtime.server.http.errors import APIError

# A body at this speed or faster never times out.
MIN_BYTES_PER_SECOND = 10_000


class BodyTimeoutMiddleware:
    """ASGI middleware: responds with a 408 if the body is not complete after `seconds`, plus one
    second for every MIN_BYTES_PER_SECOND received."""

    def __init__(self, app: ASGIApp, seconds: float) -> None:
        self.app = app
        self.seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
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
