"""Restarts an engine that dies or stops responding, up to a number of times."""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

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


@dataclass
class Supervisor:
    """Restarts the engine of a connected client.

    restarts       maximum number of restarts in a row; 0: none
    timeout        seconds without a response after which the engine is killed; 0: never
    on_restarted   called when a new engine is ready
    others_remain  whether another engine is alive or being restarted
    """

    client: EngineClient
    restarts: int
    timeout: float
    on_restarted: Callable[[], None]
    others_remain: Callable[[], bool]
    _attempt: int = 0
    _started_at: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.client.on_death = self._death_error

    async def run(self) -> None:
        """Returns when the engine has died and is not restarted."""
        watch = asyncio.create_task(self._kill_unresponsive())
        try:
            while True:
                await self.client.died_event.wait()
                dead = self.client.dead
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
            await self.client.restart()
        except EngineDead:  # it died after the start; `_death_error` has handled that
            return
        except (EngineFailed, OSError) as error:
            self.client.dead = self._death_error(EngineDead(str(error)))
            return
        self._started_at = time.monotonic()
        self.on_restarted()
        log.info("%s serves again, as %s", self.client.name, self.client.info.place)

    def _death_error(self, why: EngineDead) -> EngineDead:
        """The error that requests get: EngineRestarting, or EngineDead after the last attempt."""
        if time.monotonic() - self._started_at > RESET_SECONDS:
            self._attempt = 0
        if self._attempt == self.restarts:
            attempts = f" (after {self.restarts} restarts)" if self.restarts else ""
            if self.others_remain():
                return EngineLost(f"{self.client.name} is gone: {why}{attempts}")
            return EngineDead(f"{why}{attempts}")
        self._attempt += 1
        seconds = backoff(self._attempt) + self.client.start_seconds
        return EngineRestarting(
            f"{self.client.name} is being restarted (attempt {self._attempt} of "
            f"{self.restarts}): {why}",
            retry_after=seconds,
        )

    async def _kill_unresponsive(self) -> None:
        """Kills an engine that exceeds the timeout, unless it writes a profile."""
        client = self.client
        while self.timeout:
            await asyncio.sleep(CHECK_SECONDS)
            seconds = client.unanswered_seconds
            if client.dead is None and seconds > self.timeout and not client.writing_profile:
                client.kill_engine(
                    f"{client.name} did not answer for {seconds:.0f} s (--engine-timeout) and was "
                    "killed"
                )


def backoff(attempt: int) -> float:
    """Seconds to wait before this attempt: 1, 2, 4, ..., up to MAX_BACKOFF_SECONDS."""
    return float(min(2 ** (attempt - 1), MAX_BACKOFF_SECONDS))
