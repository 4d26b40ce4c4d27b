"""Parses JSON bodies, which are checked while they arrive."""

import codecs
import re
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
from fastapi import Request, Response
from fastapi.routing import APIRoute

from atomc.runtime.processes.garbage_collection import gc_disabled
from atomc.runtime.server.http.responses import invalid
from atomc.runtime.text.json_scan import JSONScan

SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def parse_json(text: bytes) -> Any:
    """The value of a scanned text in UTF-8. Raises ValueError if it is not JSON."""
    if b"\0" in text[:4] or text[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        raise ValueError("it is UTF-16 or UTF-32, expected UTF-8")
    try:
        # A collection would visit all values that are parsed already.
        with gc_disabled():
            return msgspec.json.decode(text[3:] if text[:3] == codecs.BOM_UTF8 else text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    except (UnicodeDecodeError, msgspec.DecodeError) as error:
        if reason := _encoding_error(text):
            raise ValueError(f"it is not UTF-8: {reason}") from error
        hint = ", or text is not valid Unicode: a surrogate is alone" * bool(SURROGATE.search(text))
        raise ValueError(f"{error}{hint}") from error


def _encoding_error(text: bytes) -> str:
    """Why bytes are not UTF-8; "" if they are."""
    try:
        text.decode()
    except UnicodeDecodeError as error:
        return error.reason
    return ""


def _refusal(scan: Callable[..., None], *data: bytes) -> str:
    """Why the scan refuses the body; "" if it does not."""
    try:
        scan(*data)
    except ValueError as error:
        return str(error)
    return ""


def checked_json_route(max_len: Callable[[], int]) -> type[APIRoute]:
    """A route class that checks bodies. max_len: returns the maximum sequence length in tokens."""

    class CheckedRequest(Request):
        async def body(self) -> bytes:
            """Raises APIError."""
            if not hasattr(self, "_body"):
                scan = JSONScan(max_len())
                chunks = []
                refusal = ""
                async for chunk in self.stream():
                    if refusal:
                        continue  # read the rest: most clients send all before they read
                    chunks.append(chunk)
                    refusal = _refusal(scan.feed, chunk)
                if refusal := refusal or _refusal(scan.end):
                    raise invalid(f"the body is refused: {refusal}")
                self._body = b"".join(chunks)
            return self._body

        async def json(self) -> Any:
            """Raises APIError."""
            if not hasattr(self, "_json"):
                body = await self.body()
                try:
                    self._json = parse_json(body)
                except ValueError as error:
                    raise invalid(f"the body is not JSON: {error}") from error
            return self._json

    class CheckedRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handle = super().get_route_handler()

            async def handle_checked(request: Request) -> Response:
                return await handle(CheckedRequest(request.scope, request.receive))

            return handle_checked

    return CheckedRoute
