"""A stream of events ends its request, whenever its client goes away."""

import asyncio
from contextlib import suppress
from typing import Any

import pytest

for package in ("msgspec", "starlette"):
    pytest.importorskip(package)

from starlette.requests import ClientDisconnect  # noqa: E402

from atomc.runtime.server.http.responses import EventStream, TextEvents, sse_event  # noqa: E402

EVENTS = [b"data: 1\n\n", b"data: 2\n\n"]


class Client:
    """Goes away before it gets message number `gone_before`.

    version   of ASGI: from 2.4 on, the server's send raises then; before, receive says so
    """

    def __init__(self, gone_before: int, version: str) -> None:
        self._left, self._raises = gone_before, version >= "2.4"
        self._gone = asyncio.Event()
        self.got: list[bytes] = []
        self.scope = {"type": "http", "asgi": {"spec_version": version}}

    async def send(self, message: dict[str, Any]) -> None:
        if not self._left:
            self._gone.set()
            if self._raises:
                raise OSError("the connection is closed")
            await asyncio.sleep(60)  # until it is cancelled
        self._left -= 1
        self.got.append(message.get("body", b""))

    async def receive(self) -> dict[str, Any]:
        await self._gone.wait()
        return {"type": "http.disconnect"}


@pytest.mark.parametrize("version", ["2.3", "2.4"])
@pytest.mark.parametrize("gone_before", [0, 1, 2, 9])
def test_a_stream_closes_its_request_whenever_the_client_goes_away(
    gone_before: int, version: str
) -> None:
    done: list[str] = []

    async def events() -> Any:
        try:
            for event in EVENTS:
                yield event
        finally:
            done.append("events")

    async def run() -> Client:
        client = Client(gone_before, version)
        with suppress(ClientDisconnect):
            stream = EventStream(events(), lambda: done.append("request"))
            await stream(client.scope, client.receive, client.send)
        return client

    client = asyncio.run(asyncio.wait_for(run(), 10))
    # Events that have not begun have nothing to end.
    assert done == ["events", "request"] if gone_before else done == ["request"]
    assert client.got[1:] == [*EVENTS, b""][: max(0, gone_before - 1)]


@pytest.mark.parametrize(
    "text", ["", "a", 'a "quoted" \\ line\n', "\u4f60\U0001f642", "\x00\ufffd"]
)
def test_events_that_differ_in_their_text_are_those_of_the_encoder(text: str) -> None:
    def event(text: str) -> Any:
        return {"id": "x", "choices": [{"index": 0, "text": text, "logprobs": None}], "n": "%s"}

    assert TextEvents(event).encode(text) == sse_event(event(text))


def test_a_text_that_is_no_unicode_is_an_error_as_in_other_events() -> None:
    with pytest.raises(UnicodeEncodeError):
        TextEvents(lambda text: {"text": text}).encode("\ud800")


def test_events_go_past_the_middleware_which_gets_start_and_end() -> None:
    async def events() -> Any:
        for event in EVENTS:
            yield event

    async def run() -> tuple[Client, Client]:
        server, middleware = Client(9, "2.4"), Client(9, "2.4")
        scope = {**server.scope, "state": {"send": server.send}}
        stream = EventStream(events(), lambda: None)
        await stream(scope, middleware.receive, middleware.send)
        return server, middleware

    server, middleware = asyncio.run(asyncio.wait_for(run(), 10))
    assert server.got == EVENTS and middleware.got == [b"", b""]
