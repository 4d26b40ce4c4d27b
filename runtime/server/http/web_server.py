"""uvicorn with a bounded shutdown: drain, abort the remaining requests, close the connections."""

import asyncio
import logging
import math
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from atomc.runtime.server.engines.client import ShuttingDown
from atomc.runtime.server.http.deadline import CLOSE_SECONDS, Deadline
from atomc.runtime.server.http.responses import APIErrorResponse, client_error

log = logging.getLogger("atomc.server")

# Time for a client to send its TLS close_notify.
TLS_CLOSE_SECONDS = 0.5
# Seconds after draining: cancel requests that do not wait for the engine, then abort connections.
CANCEL_SECONDS, ABORT_SECONDS = 0.5, 1.0


class WebServer(uvicorn.Server):
    """uvicorn's server with a bounded shutdown.

    drain_seconds           time for running requests to finish after a signal
    abort_engine_requests   called after draining: fails the requests that wait for the engine
    cancel_http_requests    called CANCEL_SECONDS later: cancels all other requests
    deadline                exits the process if the shutdown takes longer than CLOSE_SECONDS
    on_listening            called when the server listens
    status                  exit status of the process
    """

    def __init__(
        self,
        config: uvicorn.Config,
        *,
        drain_seconds: float,
        abort_engine_requests: Callable[[], None],
        cancel_http_requests: Callable[[], None],
        deadline: Deadline,
        on_listening: Callable[[], None],
    ) -> None:
        super().__init__(config)
        self.status = 0
        self._drain_seconds = drain_seconds
        self._abort_engine_requests = abort_engine_requests
        self._cancel_http_requests = cancel_http_requests
        self._deadline, self._on_listening = deadline, on_listening

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_listening()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # A second signal skips draining.
        drain = 0.0 if self.should_exit else self._drain_seconds
        if drain and (running := len(self.server_state.tasks)):
            requests = "request has" if running == 1 else "requests have"
            log.info(
                "stopping: %d running %s %g s to finish; a second signal stops now",
                running,
                requests,
                drain,
            )
        self.exit_within(drain + CLOSE_SECONDS, status=0)
        self.begin_shutdown(drain)

    def exit_within(self, seconds: float, status: int) -> None:
        """Exit the process after at most `seconds`."""
        self.status = max(self.status, status)
        self._deadline.set(seconds, self.status)

    def begin_shutdown(self, drain: float) -> None:
        """Accept no new connections; running requests have `drain` seconds to finish."""
        self.should_exit = True
        # For connections that `_abort_connections` does not see: those in a TLS handshake.
        self.config.timeout_graceful_shutdown = math.ceil(drain + ABORT_SECONDS) + 1
        loop = asyncio.get_running_loop()
        loop.call_later(drain, self._abort_engine_requests)
        loop.call_later(drain + CANCEL_SECONDS, self._cancel_http_requests)
        loop.call_later(drain + ABORT_SECONDS, self._abort_connections)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        closing = asyncio.create_task(self._abort_closed_connections())
        await super().shutdown(sockets)
        closing.cancel()

    def _abort_connections(self) -> None:
        """Abort all connections, without waiting for slow or disconnected clients."""
        self.force_exit = True
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    async def _abort_closed_connections(self) -> None:
        """Abort connections that are closed on this side with all data sent; over TLS they wait for
        the client's close_notify."""
        while True:
            await asyncio.sleep(TLS_CLOSE_SECONDS)
            for connection in list(self.server_state.connections):
                if (
                    connection.transport.is_closing()
                    and not connection.transport.get_write_buffer_size()
                ):
                    connection.transport.abort()


@dataclass
class ShutdownMiddleware:
    """ASGI middleware: `cancel_requests()` cancels all requests, which respond with a 503 if they
    have not responded yet.

    A request that waits for a thread does not wait for it any longer.
    """

    app: ASGIApp
    _requests: "set[asyncio.Task[None]]" = field(default_factory=set)

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
        scope.setdefault("state", {})["send"] = send  # for EventStream
        try:
            await self.app(scope, receive, send_and_note)
        except asyncio.CancelledError:
            if not response_started:
                await APIErrorResponse(client_error(ShuttingDown()))(scope, receive, send)
        finally:
            self._requests.discard(request)
