"""Cancels the requests that still run when the server shuts down."""

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from atomc.runtime.server.engines.client import ShuttingDown
from atomc.runtime.server.http.errors import client_error
from atomc.runtime.server.http.responses import APIErrorResponse


class ShutdownMiddleware:
    """ASGI middleware: `cancel_requests()` cancels all requests, which respond with a 503 if they
    have not responded yet.

    A request that waits for a thread does not wait for it any longer.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self._requests: set[asyncio.Task[None]] = set()

    def cancel_requests(self) -> None:
        for request in self._requests:
            request.cancel()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = asyncio.current_task()
        assert request is not None
        response_started = False

        async def send_and_note(message: Message) -> None:
            nonlocal response_started
            response_started = True
            await send(message)

        self._requests.add(request)
        try:
            await self.app(scope, receive, send_and_note)
        except asyncio.CancelledError:
            if not response_started:
                await APIErrorResponse(client_error(ShuttingDown()))(scope, receive, send)
        finally:
            self._requests.discard(request)
