"""Work for a client ends with its connection, and nothing else is cancelled."""

import asyncio
from typing import Any

import pytest

pytest.importorskip("starlette")

from starlette.requests import ClientDisconnect, Request

from atomc.runtime.server.http.responses import cancel_on_disconnect


class Client:
    def __init__(self) -> None:
        self.gone = asyncio.Event()

    async def receive(self) -> dict[str, str]:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    @property
    def request(self) -> Request:
        return Request({"type": "http"}, self.receive)


def run(test: Any) -> None:
    asyncio.run(asyncio.wait_for(test(Client()), 10))


def test_work_has_its_result_and_a_later_disconnect_cancels_nothing() -> None:
    async def test(client: Client) -> None:
        async def work() -> int:
            client.gone.set()  # the connection ends together with the work
            return 7

        assert await cancel_on_disconnect(client.request, work()) == 7
        for _ in range(5):
            await asyncio.sleep(0)

    run(test)


def test_a_disconnect_cancels_the_work_and_the_task_goes_on() -> None:
    async def test(client: Client) -> None:
        ended = []

        async def work() -> None:
            try:
                client.gone.set()
                await asyncio.sleep(60)
            finally:
                ended.append("work")

        with pytest.raises(ClientDisconnect):
            await cancel_on_disconnect(client.request, work())
        assert ended == ["work"]
        task = asyncio.current_task()
        assert task is not None and not task.cancelling()
        await asyncio.sleep(0)

    run(test)


def test_an_error_of_the_work_is_raised() -> None:
    async def test(client: Client) -> None:
        async def work() -> None:
            raise ValueError("no")

        with pytest.raises(ValueError, match="no"):
            await cancel_on_disconnect(client.request, work())

    run(test)


@pytest.mark.parametrize("gone", [False, True], ids=["", "at the same time"])
def test_a_task_that_is_cancelled_is_not_a_disconnect(gone: bool) -> None:
    async def test(client: Client) -> None:
        task = asyncio.create_task(cancel_on_disconnect(client.request, asyncio.sleep(60)))
        await asyncio.sleep(0)
        if gone:
            client.gone.set()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(test)
