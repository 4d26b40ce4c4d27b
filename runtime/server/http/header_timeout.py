"""Closes connections that do not send the headers of a request in time."""

import asyncio
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

from atomc.runtime.server.http.responses import APIError, APIErrorResponse


def header_timeout_protocol(header_timeout: float) -> type[asyncio.Protocol]:
    """uvicorn's protocol with a timeout for the headers. The time starts with the connection, and
    for each further request with its first byte."""

    class HeaderTimeoutProtocol(AutoHTTPProtocol):  # type: ignore[misc,valid-type]
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)
            self._received_data = False
            self._timer: asyncio.TimerHandle | None = None
            self._start_timer()

        def data_received(self, data: bytes) -> None:
            self._received_data = True
            last: Any = self.cycle
            super().data_received(data)
            if self.cycle is not last or (last is not None and not last.response_complete):
                self._cancel_timer()
            else:
                self._start_timer()

        def connection_lost(self, error: Exception | None) -> None:
            self._cancel_timer()
            super().connection_lost(error)

        def _start_timer(self) -> None:
            if self._timer is None:
                self._timer = asyncio.get_running_loop().call_later(header_timeout, self._too_late)

        def _cancel_timer(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

        def _too_late(self) -> None:
            # After a response, late data may be the rest of a body that was already answered: send
            # no second response.
            if self._received_data and self.cycle is None:
                self.transport.write(TIMEOUT_RESPONSE)
            self.transport.close()

    return HeaderTimeoutProtocol


def _too_late() -> bytes:
    error = APIErrorResponse(
        APIError(408, "timed out waiting for the headers of the request", code="header_timeout")
    )
    head = b"".join(b"%s: %s\r\n" % header for header in error.raw_headers)
    return (
        b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\n"
        + head
        + b"\r\n"
        + bytes(error.body)
    )


TIMEOUT_RESPONSE = _too_late()
