"""Paces requests that arrive at once, so that running streams get their tokens meanwhile."""

import asyncio
from collections import deque
from dataclasses import dataclass, field

from starlette.types import ASGIApp, Receive, Scope, Send

# Of the requests that are ready in one iteration of the event loop, so many run: 8 x 0.4 ms.
TURNS = 8


@dataclass
class Turns:
    """At most TURNS calls of `take` return in one iteration of the event loop, in their order."""

    _num_left: int = TURNS
    _waiting: "deque[asyncio.Future[None]]" = field(default_factory=deque)

    async def take(self) -> None:
        if self._num_left == TURNS:  # the first one of this iteration
            asyncio.get_running_loop().call_soon(self._renew)
        if not self._num_left:
            waiting = asyncio.get_running_loop().create_future()
            self._waiting.append(waiting)
            await waiting
            return
        self._num_left -= 1

    def _renew(self) -> None:
        """Give the turns of the next iteration to those that wait."""
        self._num_left = TURNS
        while self._waiting and self._num_left:
            waiting = self._waiting.popleft()
            if not waiting.done():  # cancelled
                waiting.set_result(None)
                self._num_left -= 1
        if self._num_left < TURNS:
            asyncio.get_running_loop().call_soon(self._renew)


@dataclass
class TurnsMiddleware:
    """ASGI middleware: each request begins in its turn."""

    app: ASGIApp
    turns: Turns

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.turns.take()
        await self.app(scope, receive, send)
