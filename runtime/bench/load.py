"""Load generation: sends requests at a given rate and concurrency."""

import asyncio
import math
import random
import time
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from itertools import accumulate

from tqdm import tqdm

from atomc.runtime.bench.client import Server
from atomc.runtime.bench.datasets import SampleRequest
from atomc.runtime.bench.metrics import RequestTiming


def arrivals(count: int, rate: float, seed: int) -> list[float]:
    """Send times in seconds: a Poisson process with `rate` per second that starts at 0; inf: all at
    0.
    """
    if not rate > 0:
        raise ValueError(f"the request rate is {rate}, expected a number above 0 or inf")
    rng = random.Random(seed)
    gaps = [0.0 if math.isinf(rate) else rng.expovariate(rate) for _ in range(count - 1)]
    return list(accumulate(gaps, initial=0.0))


async def run(
    server: Server,
    samples: Sequence[SampleRequest],
    *,
    rate: float = math.inf,
    max_concurrency: int | None = None,
    seed: int = 0,
    progress: bool = True,
) -> list[RequestTiming]:
    """Sends all requests and returns their timings, in the order of `samples`.

    Sends the first one alone before, uncounted. Raises ValueError if that fails.
    """
    first = await server.send(SampleRequest(samples[0].prompt, 1), time.perf_counter())
    if first.error is not None:
        raise ValueError(f"the first request to {server.url} failed: {first.error}")
    semaphore: AbstractAsyncContextManager[None] = (
        asyncio.Semaphore(max_concurrency) if max_concurrency is not None else nullcontext()
    )
    due = arrivals(len(samples), rate, seed)
    began = time.perf_counter()

    with tqdm(total=len(samples), unit="request", disable=None if progress else True) as bar:

        async def one(sample: SampleRequest, at: float) -> RequestTiming:
            await asyncio.sleep(max(0.0, at - (time.perf_counter() - began)))
            async with semaphore:
                timing = await server.send(sample, began)
            bar.update()
            return timing

        return await asyncio.gather(
            *(one(sample, at) for sample, at in zip(samples, due, strict=True))
        )
