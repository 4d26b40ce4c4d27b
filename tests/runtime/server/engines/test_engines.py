"""Calls of several engines: all load a LoRA adapter, or sleep, or none does."""

import asyncio

import pytest

pytest.importorskip("zmq")
from atomc.runtime.server.engines.client import EngineDead, EngineRestarting
from atomc.runtime.server.engines.engine_group import Engines


class Client:
    """An engine that answers calls, and remembers those that it did."""

    dead = None
    num_unfinished = 0

    def __init__(self, error=None):
        self.error, self.did = error, []

    async def call(self, name, *args):
        if self.error is not None:
            raise self.error
        self.did.append((name, *args[:1]))
        return ""


@pytest.mark.parametrize(
    ("errors", "raised"),
    [
        ((None, ValueError("no")), ValueError),
        ((EngineDead("gone"), ValueError("no")), ValueError),
        ((EngineDead("gone"), EngineDead("gone")), EngineDead),
        ((None, EngineRestarting("it starts again", 1.0)), EngineRestarting),
    ],
)
def test_an_adapter_that_one_engine_refuses_is_loaded_by_none(errors, raised):
    clients = [Client(error) for error in errors]
    with pytest.raises(raised):
        asyncio.run(Engines(clients).load_adapter("a", "folder"))
    done = [("load_adapter", "a"), ("unload_adapter", "a")]
    assert [client.did for client in clients] == [[] if each else done for each in errors]


def test_an_engine_that_died_does_not_keep_the_others_from_loading():
    clients = [Client(), Client(EngineDead("gone"))]
    asyncio.run(Engines(clients).load_adapter("a", "folder"))
    assert clients[0].did == [("load_adapter", "a")]


def test_adapters_change_and_engines_sleep_when_none_is_being_restarted():
    engines = Engines([Client(), Client()])
    engines.check_none_restarts()
    engines.clients[1].dead = EngineRestarting("it starts with the adapters of before", 1.0)
    with pytest.raises(EngineRestarting):
        engines.check_none_restarts()
    with pytest.raises(EngineRestarting):
        asyncio.run(engines.sleep())
    assert engines.clients[0].did == []
    engines.clients[1].dead = EngineDead("gone")
    asyncio.run(engines.sleep())
    assert engines.clients[0].did == [("sleep",)]
