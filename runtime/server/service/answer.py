"""The answer to one request that generates text: one JSON body, or a stream of events."""

import time
from collections.abc import AsyncIterator
from typing import Generic, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from atomc.runtime.server.http.responses import (
    APIError,
    EventStream,
    JSONResponse,
    cancel_on_disconnect,
    request_id,
    sse_event,
)
from atomc.runtime.server.service.generation import Generation
from atomc.runtime.server.service.protocol import SamplingFields
from atomc.runtime.server.service.service import Service

Body = TypeVar("Body", bound=SamplingFields)


class Answer(Generic[Body]):
    """An API implements `complete`, one JSON body, and `events`, server-sent events; both run while
    the generation is open.
    """

    def __init__(
        self, service: Service, body: Body, request: Request, generation: Generation
    ) -> None:
        self.service, self.body, self.request = service, body, request
        self.generation = generation
        self.request_id, self.created = request_id(request), int(time.time())

    async def complete(self) -> object:
        raise NotImplementedError

    def events(self) -> AsyncIterator[bytes]:
        raise NotImplementedError

    def failure(self, error: APIError) -> bytes:
        """The last events of a stream that this error ends."""
        return sse_event(error.body())

    async def respond(self) -> Response:
        if self.body.stream:
            return EventStream(self._stream(), self.generation.close)
        return JSONResponse(await cancel_on_disconnect(self.request, self._complete()))

    async def _complete(self) -> object:
        with self.generation:
            return await self.complete()

    async def _stream(self) -> AsyncIterator[bytes]:
        try:
            with self.generation:
                async for event in self.events():
                    yield event
        except Exception as error:  # the response has begun: its last event says what failed
            yield self.failure(self.service.stream_error(error))
