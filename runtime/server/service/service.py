"""The objects that all endpoints share: engines, model, config and metrics."""

import asyncio
import logging
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from starlette.requests import Request

from atomc.runtime.requests.sampling_params import SamplingParams
from atomc.runtime.server.config import ServerConfig
from atomc.runtime.server.engines.engine_group import Engines
from atomc.runtime.server.engines.ipc import Submit
from atomc.runtime.server.http.responses import APIError, client_error, unavailable
from atomc.runtime.server.http.turns import Turns
from atomc.runtime.server.metrics import Metrics
from atomc.runtime.server.service.image_budget import ImageBudget
from atomc.runtime.server.service.image_reader import ImageReader
from atomc.runtime.server.service.model_info import ModelInfo
from atomc.runtime.server.service.response_store import ResponseStore

if TYPE_CHECKING:
    from atomc.runtime.server.service.traces import Traces

log = logging.getLogger("atomc.server")
READY_SECONDS = 30.0
# Readiness probes within this time share one generated token.
PROBE_SECONDS = 1.0


@dataclass
class Service:
    """The objects that all endpoints share.

    max_requests   the maximum number of choices of one HTTP request
    image_budget   for images that are being prepared
    images         reads the images of messages, if the model reads images
    responses      those that the Responses API can retrieve
    turns          of requests that begin, and of those that the engine has accepted
    traces         gets the ended requests, if they are traced
    """

    engines: Engines
    model: ModelInfo
    config: ServerConfig
    metrics: Metrics
    max_requests: int
    image_budget: ImageBudget
    images: ImageReader | None = None
    traces: "Traces | None" = None
    responses: ResponseStore = field(init=False)
    turns: Turns = field(default_factory=Turns, init=False)
    started: float = field(default_factory=time.monotonic, init=False)
    _ready_task: "asyncio.Task[None] | None" = field(default=None, init=False)
    _ready_started: float = field(default=-PROBE_SECONDS, init=False)

    def __post_init__(self) -> None:
        self.responses = ResponseStore(self.config.response_store_bytes)

    def update_sizes(self) -> None:
        """Read the model's sizes from engines that have started."""
        info = self.engines.clients[0].info
        self.model.max_len, self.model.vocab_size = self.engines.max_len, info.vocab_size

    def prefix_salt(self, request: Request, salt: str | None = None) -> str | None:
        """The salt of a request: with that of its body, prefixes are shared with requests of the
        same key that have the same one.
        """
        caller = request.scope["state"].get("caller")
        if caller is None or self.config.share_prefixes:
            return salt
        return f"key {caller}" if salt is None else f"key {caller} {salt}"

    def stream_error(self, error: Exception) -> APIError:
        """The error event of a stream that has begun; logs internal errors."""
        answer = client_error(error)
        if answer.status == 500 and not isinstance(error, APIError):
            log.error("a stream failed", exc_info=error)
        self.metrics.refused.labels(self.metrics.model, answer.status).inc()
        return answer

    async def ready(self) -> None:
        """Generates one token, at most once per PROBE_SECONDS. Raises as Generation.start."""
        now = time.monotonic()
        if self._ready_task is None or (
            self._ready_task.done() and now - self._ready_started > PROBE_SECONDS
        ):
            self._ready_task, self._ready_started = asyncio.create_task(self._generate_one()), now
        await asyncio.shield(self._ready_task)

    async def _generate_one(self) -> None:
        stream = self.engines.submit(
            [Submit(self.engines.next_id(), [0], SamplingParams(max_tokens=1, ignore_eos=True))]
        )
        try:
            async with asyncio.timeout(READY_SECONDS):
                await stream.wait_accepted()
                async for output in stream:
                    if output.error is not None:
                        raise unavailable(f"no token: {output.error.message}", "not_ready")
        except TimeoutError as error:
            raise unavailable(f"no token in {READY_SECONDS:.0f} s", "not_ready") from error
        finally:
            stream.close()
