"""Restarts an engine that dies or stops responding, up to a number of times."""

import asyncio
import logging
import time
from collections.abc import Callable

from atomc.runtime.server.engines.client import (
    EngineClient,
    EngineDead,
    EngineFailed,
    EngineLost,
    EngineRestarting,
)

log = logging.getLogger("atomc.server")
# After this time without a failure, the number of attempts starts from 0 again.
RESET_SECONDS = 600.0
MAX_BACKOFF_SECONDS = 30.0
CHECK_SECONDS = 0.5


class Supervisor:
    """Restarts the engine of a connected client.

    restarts       maximum number of restarts in a row; 0: none
    timeout        seconds without a response after which the engine is killed; 0: never
    on_restarted   called when a new engine is ready
    others_remain  whether another engine is alive or being restarted
    """

    def __init__(
        self,
        client: EngineClient,
        *,
        restarts: int,
        timeout: float,
        on_restarted: Callable[[], None],
        others_remain: Callable[[], bool],
    ) -> None:
        self._client = client
        self._restarts, self._timeout, self._on_restarted = restarts, timeout, on_restarted
        self._others_remain = others_remain
        self._attempt = 0
        self._started_at = time.monotonic()
        client.on_death = self._death_error

    async def run(self) -> None:
        """Returns when the engine has died and is not restarted."""
        watch = asyncio.create_task(self._kill_unresponsive())
        try:
            while True:
                await self._client.died_event.wait()
                dead = self._client.dead
                assert dead is not None
                if isinstance(dead, EngineRestarting | EngineLost):
                    log.error("%s", dead)
                if not isinstance(dead, EngineRestarting):
                    return
                await asyncio.sleep(backoff(self._attempt))
                await self._restart()
        finally:
            watch.cancel()

    async def _restart(self) -> None:
        try:
            await self._client.restart()
        except EngineDead:  # it died after the start; `_death_error` has handled that
            return
        except (EngineFailed, OSError) as error:
            self._client.dead = self._death_error(EngineDead(str(error)))
            return
        self._started_at = time.monotonic()
        self._on_restarted()
        log.info("%s serves again, as %s", self._client.name, self._client.info.place)

    def _death_error(self, why: EngineDead) -> EngineDead:
        """The error that requests get: EngineRestarting, or EngineDead after the last attempt."""
        if time.monotonic() - self._started_at > RESET_SECONDS:
            self._attempt = 0
        if self._attempt == self._restarts:
            attempts = f" (after {self._restarts} restarts)" if self._restarts else ""
            if self._others_remain():
                return EngineLost(f"{self._client.name} is gone: {why}{attempts}")
            return EngineDead(f"{why}{attempts}")
        self._attempt += 1
        seconds = backoff(self._attempt) + self._client.start_seconds
        return EngineRestarting(
            f"{self._client.name} is being restarted (attempt {self._attempt} of "
            f"{self._restarts}): {why}",
            retry_after=seconds,
        )

    async def _kill_unresponsive(self) -> None:
        """Kills an engine that exceeds the timeout, unless it writes a profile."""
        client = self._client
        while self._timeout:
            await asyncio.sleep(CHECK_SECONDS)
            seconds = client.unanswered_seconds
            if client.dead is None and seconds > self._timeout and not client.writing_profile:
                client.kill_engine(
                    f"{client.name} did not answer for {seconds:.0f} s (--engine-timeout) and was "
                    "killed"
                )


def backoff(attempt: int) -> float:
    """Seconds to wait before this attempt: 1, 2, 4, ..., up to MAX_BACKOFF_SECONDS."""
    return float(min(2 ** (attempt - 1), MAX_BACKOFF_SECONDS))
