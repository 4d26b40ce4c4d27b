"""Load for a server: when requests are sent, and how many are under way at once."""

import asyncio
import math
import random
import time
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import accumulate
from typing import Any

from tqdm import tqdm

from atomc.runtime.bench.client import Server
from atomc.runtime.bench.figures import Timed
from atomc.runtime.bench.prompts import Ask


def arrivals(count: int, rate: float, seed: int) -> list[float]:
    """Seconds at which requests are sent: a Poisson process of `rate` a second, the first at 0; all at 0 for inf."""
    if not rate > 0:
        raise ValueError(f"the request rate is {rate}, expected a number above 0, or inf")
    drawn = random.Random(seed)
    gaps = [0.0 if math.isinf(rate) else drawn.expovariate(rate) for _ in range(count - 1)]
    return list(accumulate(gaps, initial=0.0))


async def run(
    server: Server, asks: Sequence[Ask], *, rate: float = math.inf, max_concurrency: int | None = None, seed: int = 0,
    progress: bool = True,
) -> list[Timed]:  # fmt: skip
    """Sends every request and returns their times, in the order of `asks`.

    The first one is sent alone, uncounted, before: if it fails, ValueError says why.
    """
    first = await server.send(Ask(asks[0].prompt, 1), time.perf_counter())
    if first.error is not None:
        raise ValueError(f"{server.url} refuses the first request: {first.error}")
    gate: Any = asyncio.Semaphore(max_concurrency) if max_concurrency is not None else nullcontext()
    due = arrivals(len(asks), rate, seed)
    began = time.perf_counter()

    with tqdm(total=len(asks), unit="request", disable=None if progress else True) as bar:

        async def one(ask: Ask, at: float) -> Timed:
            await asyncio.sleep(max(0.0, at - (time.perf_counter() - began)))
            async with gate:
                timed = await server.send(ask, began)
            bar.update()
            return timed

        return await asyncio.gather(*(one(ask, at) for ask, at in zip(asks, due, strict=True)))
