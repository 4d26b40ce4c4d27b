"""Reads what is left of a body before the connection of a refused request is closed."""

import asyncio
from contextlib import suppress

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from atomc.runtime.server.http.errors import APIError

# A client that still sends has this long to read the response before the connection is closed.
LINGER_SECONDS = 1.0


class UnreadBodyMiddleware:
    """ASGI middleware: a response with `Connection: close` ends when the body was read, which is
    dropped, or after LINGER_SECONDS. Closing a connection with unread data resets it, and the
    client can lose the response.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
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
