"""A refused request whose body was not read: the connection closes when it was, or after a while."""

import asyncio
from typing import Any

import pytest

pytest.importorskip("starlette")

from starlette.responses import Response

from atomc.runtime.server.http import request_body
from atomc.runtime.server.http.request_body import UnreadBodyMiddleware

CLOSES, STAYS = {"Connection": "close"}, {"X": "y"}


def events(headers: dict[str, str], parts: list[bytes], *, reads: int = 0) -> list[str]:
    """What happens, in order: a part of the body is received, a message is sent. The app reads some
    parts, then refuses the request; a client without further parts sends nothing more.
    """
    happened: list[str] = []
    left = parts.copy()

    async def receive() -> dict[str, Any]:
        if not left:
            await asyncio.sleep(60)
        part = left.pop(0)
        happened.append(f"received {part.decode()}")
        return {"type": "http.request", "body": part, "more_body": part != b"end"}

    async def send(message: Any) -> None:
        more = ", more follows" if message.get("more_body") else ""
        happened.append(message["type"].removeprefix("http.") + more)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        for _ in range(reads):
            await receive()
        await Response("no", 413, headers)(scope, receive, send)

    asyncio.run(UnreadBodyMiddleware(app)({"type": "http"}, receive, send))
    return happened


def test_the_rest_of_the_body_is_read_before_the_response_ends() -> None:
    assert events(CLOSES, [b"a", b"b", b"end"], reads=1) == [
        "received a",
        "response.start",
        "response.body, more follows",
        "received b",
        "received end",
        "response.body",
    ]


def test_a_client_that_sends_nothing_more_is_waited_for_a_while(monkeypatch: Any) -> None:
    monkeypatch.setattr(request_body, "LINGER_SECONDS", 0.01)
    assert events(CLOSES, [b"a"])[-2:] == ["received a", "response.body"]


def test_a_response_to_a_whole_body_and_one_that_keeps_the_connection_end_at_once() -> None:
    assert events(CLOSES, [b"end"], reads=1)[1:] == ["response.start", "response.body"]
    assert events(STAYS, [b"a", b"end"]) == ["response.start", "response.body"]
