"""The engines of a server as one client: chooses the engine of each prompt."""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import count, groupby

from atomc.runtime.scheduling.stats import Stats, total
from atomc.runtime.server.engines.client import (
    EngineClient,
    EngineDead,
    EngineRestarting,
    ShuttingDown,
)
from atomc.runtime.server.engines.control_calls import CallName
from atomc.runtime.server.engines.ipc import Submit
from atomc.runtime.server.engines.request_stream import RequestStream
from atomc.runtime.sleeping import refuse_running


class Engines:
    """Engines that serve the same model, each with its own scheduler and KV cache. `await
    connect()` first, `await close()` last.

    A prompt, with all its choices, goes to the engine with the fewest unfinished requests, of
    several the first. Engines that are dead or do not answer get none while another one serves.
    """

    def __init__(self, clients: Sequence[EngineClient]) -> None:
        assert clients
        self.clients = clients
        self._ids = count()

    async def connect(self) -> None:
        """Returns when all are ready. Raises EngineFailed if one cannot start."""
        tasks = [asyncio.create_task(client.connect()) for client in self.clients]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def close(self) -> None:
        """Ends the engine processes; running requests fail."""
        await asyncio.gather(*(client.close() for client in self.clients))

    def kill(self) -> None:
        """Kills the processes that run now; does not wait."""
        for client in self.clients:
            client.engine.kill()

    @property
    def alive(self) -> list[EngineClient]:
        """Those that are not dead."""
        return [client for client in self.clients if client.dead is None]

    def others_remain(self, client: EngineClient) -> bool:
        """Whether another one is alive or being restarted."""
        others = [other.dead for other in self.clients if other is not client]
        return any(why is None or isinstance(why, EngineRestarting) for why in others)

    @property
    def dead(self) -> EngineDead | None:
        """Why there is no engine: the soonest restart, if there is one. None while one is alive."""
        if self.alive:
            return None
        reasons = [client.dead for client in self.clients if client.dead is not None]
        for why in reasons:
            if isinstance(why, ShuttingDown):
                return why
        restarting = [why for why in reasons if isinstance(why, EngineRestarting)]
        if restarting:
            return min(restarting, key=lambda why: why.retry_after)
        return EngineDead("; ".join(map(str, reasons)))

    @property
    def unhealthy(self) -> dict[int, str]:
        """Why engines cannot serve requests, by their numbers."""
        reasons = enumerate(client.unhealthy_reason for client in self.clients)
        return {number: reason for number, reason in reasons if reason is not None}

    @property
    def unhealthy_reason(self) -> str | None:
        """Why no engine can serve requests; None if one can."""
        reasons = self.unhealthy
        return "; ".join(reasons.values()) if len(reasons) == len(self.clients) else None

    @property
    def max_len(self) -> int:
        """Maximum sequence length in tokens that all accept."""
        return min(client.info.max_len for client in self.clients)

    @property
    def stats(self) -> Stats | None:
        """The sums of the last stats of the engines that are alive, or of all that are dead."""
        clients = self.alive or self.clients
        parts = [client.stats for client in clients if client.stats is not None]
        return total(parts) if parts else None

    async def update_stats(self) -> None:
        """Returns when `stats` are current. Raises EngineDead without an engine."""
        self._check()
        # One that dies meanwhile keeps its last stats.
        await _outcomes(self.alive, "stats")

    async def call(self, name: CallName, *args: str) -> str:
        """The reply of the first engine that is alive, as of EngineClient.call."""
        self._check()
        return await self.alive[0].call(name, *args)

    async def call_all(self, name: CallName) -> list[str]:
        """The replies of all engines that are alive. Raises as EngineClient.call of any of them."""
        self._check()
        return await asyncio.gather(*(client.call(name) for client in self.alive))

    def check_none_restarts(self) -> None:
        """Raises EngineRestarting while an engine starts again, which is awake then, with the LoRA
        adapters that it was started with. EngineDead without an engine.
        """
        self._check()
        for client in self.clients:
            if isinstance(client.dead, EngineRestarting):
                raise client.dead

    async def load_adapter(self, name: str, folder: str) -> None:
        """Returns when all engines have loaded this LoRA adapter. Raises ValueError with the reason
        if one cannot, EngineRestarting if one has to start again, after which none has it;
        EngineDead without an engine.
        """
        self._check()
        clients = self.alive
        results = await _outcomes(clients, "load_adapter", name, folder)
        errors = [result for result in results if isinstance(result, BaseException)]
        refused = [
            error
            for error in errors
            if isinstance(error, EngineRestarting) or not isinstance(error, EngineDead)
        ]
        if not refused and len(errors) < len(clients):
            return
        pairs = zip(clients, results, strict=True)
        loaded = [client for client, result in pairs if isinstance(result, str)]
        await _outcomes(loaded, "unload_adapter", name)
        raise (refused or errors)[0]

    async def unload_adapter(self, name: str) -> None:
        """Returns when no engine takes further requests with this LoRA adapter."""
        self._check()
        await _outcomes(self.alive, "unload_adapter", name)

    def keep_adapters(self, adapters: Mapping[str, str]) -> None:
        """Have restarted engines load these LoRA adapters: name -> folder."""
        for client in self.clients:
            client.engine.config = replace(client.engine.config, lora=dict(adapters))

    async def sleep(self) -> None:
        """Returns when all engines sleep. Raises ValueError if requests wait or run, and
        EngineRestarting if one starts again; none sleeps then. EngineDead as above.
        """
        self.check_none_restarts()
        refuse_running(sum(client.num_unfinished for client in self.alive))
        for result in await _outcomes(self.alive, "sleep"):
            if isinstance(result, BaseException):
                await self.call_all("wake_up")
                raise result

    def next_id(self) -> str:
        """A unique request id. The choices of a prompt have it with /0, /1, ... behind it."""
        return str(next(self._ids))

    def submit(self, requests: Sequence[Submit]) -> RequestStream:
        """Send requests to engines; returns the stream of their outputs. Raises EngineDead."""
        self._check()
        stream = RequestStream([request.id for request in requests], self._abort)
        for _, choices in groupby(requests, lambda request: request.id.partition("/")[0]):
            self._least_loaded().submit(list(choices), stream)
        return stream

    def abort_all(self) -> None:
        """Abort all requests, for the shutdown; their streams raise ShuttingDown."""
        for client in self.clients:
            client.abort_all()

    def _least_loaded(self) -> EngineClient:
        return min(
            self.alive,
            key=lambda client: (client.unhealthy_reason is not None, client.num_unfinished),
        )

    def _abort(self, ids: Iterable[str]) -> None:
        listed = list(ids)
        for client in self.clients:
            client.abort(listed)

    def _check(self) -> None:
        if (why := self.dead) is not None:
            raise why


async def _outcomes(
    clients: Sequence[EngineClient], name: CallName, *args: str
) -> list[str | BaseException]:
    """Of one call of each engine: its reply, or its error."""
    calls = (client.call(name, *args) for client in clients)
    return await asyncio.gather(*calls, return_exceptions=True)
