"""The HTTP server, and how it ends: what runs may finish, then clients are told, then connections are cut."""

import asyncio
import math
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn

from atomc.runtime.server.deadline import CLOSE_SECONDS, Deadline

# Over TLS a client has so long to say goodbye.
TLS_CLOSE_SECONDS = 0.5
# Before, what does not wait for the engine, either, is given up.
CANCEL_SECONDS, ABORT_SECONDS = 0.5, 1.0


class WebServer(uvicorn.Server):
    """uvicorn's, which says where it listens once it does, and ends in time.

    drain_seconds  what runs may take so long to finish, once a signal says that the server is to end
    drained        called when that is over, and tells those that wait for the engine
    give_up        called a moment later, and tells those that wait for anything else
    deadline       ends the process if it does not end by itself, CLOSE_SECONDS later
    status         of the process, when it has ended
    """

    def __init__(
        self, config: uvicorn.Config, *, drain_seconds: float, abort_engine_requests: Callable[[], None],
        cancel_http_requests: Callable[[], None], deadline: Deadline, on_listening: Callable[[], None],
    ) -> None:  # fmt: skip
        super().__init__(config)
        self.status = 0
        self._drain_seconds, self._deadline, self._on_listening = drain_seconds, deadline, on_listening
        self._abort_engine_requests, self._cancel_http_requests = abort_engine_requests, cancel_http_requests

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_listening()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # A second signal does not wait.
        drain = 0.0 if self.should_exit else self._drain_seconds
        self.exit_within(drain + CLOSE_SECONDS, status=0)
        self.begin_shutdown(drain)

    def exit_within(self, seconds: float, status: int) -> None:
        """The process ends in so many seconds, at the latest."""
        self.status = max(self.status, status)
        self._deadline.set(seconds, self.status)

    def begin_shutdown(self, drain: float) -> None:
        """No new connections; what runs has so many seconds to finish."""
        self.should_exit = True
        # For what `_cut` does not know: connections in the middle of a TLS handshake.
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
        """Does not wait any more for readers that are slow or gone."""
        self.force_exit = True
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    async def _abort_closed_connections(self) -> None:
        """Ends connections that are closed on this side and sent all: over TLS they wait for a goodbye of the client."""
        while True:
            await asyncio.sleep(TLS_CLOSE_SECONDS)
            for connection in list(self.server_state.connections):
                if connection.transport.is_closing() and not connection.transport.get_write_buffer_size():
                    connection.transport.abort()
