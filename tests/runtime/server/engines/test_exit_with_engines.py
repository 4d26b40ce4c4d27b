"""When the server ends because of its engines."""

import asyncio
import logging
from types import SimpleNamespace

import pytest

pytest.importorskip("fastapi")
from atomc.runtime.server import serve


class Server:
    def __init__(self):
        self.calls = []

    def exit_within(self, seconds, status):
        self.calls.append(("exit", status))

    def begin_shutdown(self, drain_seconds):
        self.calls.append(("shutdown", drain_seconds))


class Supervised:
    """An engine that is supervised for ever, until it has died, or until its supervisor fails."""

    def __init__(self, end):
        self.end = end

    async def run(self):
        if self.end == "never":
            await asyncio.Event().wait()
        if self.end == "fails":
            raise OSError("no more processes")


async def watched(*ends):
    server = Server()
    watching = serve._exit_with_engines(
        server, SimpleNamespace(dead="both are gone"), [Supervised(end) for end in ends]
    )
    try:
        await asyncio.wait_for(watching, 0.2)
    except TimeoutError:
        assert not server.calls
    return server.calls


@pytest.mark.parametrize(
    "ends, message",
    [
        (("dies", "dies"), "both are gone; the server ends"),
        (("never", "fails"), "the supervision of the engines failed; the server ends"),
        (("never", "dies"), None),
    ],
)
def test_the_server_ends_with_its_last_engine_and_not_before(ends, message, monkeypatch, caplog):
    monkeypatch.setattr(serve, "ERROR_GRACE_SECONDS", 0.0)
    caplog.set_level(logging.ERROR)
    calls = asyncio.run(watched(*ends))
    assert calls == ([] if message is None else [("exit", 1), ("shutdown", 0.0)])
    assert caplog.messages == ([] if message is None else [message])
    assert ("no more processes" in caplog.text) == ("fails" in ends)
