"""ASGI middleware: a body comes in time, or its request ends with a 408."""

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from atomc.runtime.server.errors import APIError

# A body that comes at this speed or faster is never late.
MIN_BYTES_PER_SECOND = 10_000


class BodyTimeoutMiddleware:
    """A body has `seconds` to come, and one more for every BYTES_A_SECOND that came."""

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
            if complete:  # what comes now is that the client goes away
                return await receive()
            deadline = deadline or loop.time() + self.seconds
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                # The rest of the body is not read, so the connection cannot serve another request.
                raise APIError(408, "the body of the request did not come in time", code="body_timeout",
                               headers={"Connection": "close"}) from None  # fmt: skip
            deadline += len(message.get("body", b"")) / MIN_BYTES_PER_SECOND
            complete = not message.get("more_body", False)
            return message

        await self.app(scope, receive_timed, send)
