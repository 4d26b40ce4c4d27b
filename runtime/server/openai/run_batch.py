"""`atomc run-batch`: sends the requests of a batch file to the endpoints, without HTTP."""

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import msgspec
from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import Response
from tqdm import tqdm

from atomc.errors import RunError
from atomc.runtime.server.config import ServerConfig
from atomc.runtime.server.engines.client import EngineDead, EngineHandle, EngineLost
from atomc.runtime.server.http.responses import APIError, client_error, invalid, invalid_field
from atomc.runtime.server.http.unknown_fields import check_unknown_fields
from atomc.runtime.server.openai.batch_line import (
    BatchRequest,
    LineError,
    read_request,
    result_line,
)
from atomc.runtime.server.openai.chat_completions import chat
from atomc.runtime.server.openai.completions import complete
from atomc.runtime.server.openai.embeddings import embed
from atomc.runtime.server.running_service import running_service
from atomc.runtime.server.service.image_budget import STATE, ImageReservation
from atomc.runtime.server.service.protocol import ChatRequest, CompletionRequest, EmbeddingRequest
from atomc.runtime.server.service.service import Service
from atomc.runtime.text.json_scan import scan_json

log = logging.getLogger("atomc.server")
# Requests that are prepared, wait for the engine or run; enough to fill its batches.
NUM_RUNNING = 512
Endpoint = Callable[[Service, Any, Request], Awaitable[Response]]
ENDPOINTS: dict[str, tuple[type[BaseModel], Endpoint]] = {
    "/v1/chat/completions": (ChatRequest, chat),
    "/v1/completions": (CompletionRequest, complete),
    "/v1/embeddings": (EmbeddingRequest, embed),
}


async def run_batch(
    config: ServerConfig,
    processes: Sequence[EngineHandle],
    folder: Path,
    name: str,
    source: Path,
    target: Path,
) -> tuple[int, int]:
    """Answer the requests of `source` in `target`; returns how many there were, and how many
    failed.

    Responses are written in the order in which they are complete. Raises EngineFailed if the engine
    cannot start, RunError if it dies or a response cannot be written.
    """
    with source.open("rb") as lines:
        total = sum(1 for line in lines if line.strip())
    async with running_service(config, processes, folder, name) as service:
        with (
            source.open("rb") as lines,
            target.open("wb") as out,
            tqdm(total=total, unit="request", disable=None) as bar,
        ):

            def write(line: bytes) -> None:
                out.write(line)
                bar.update()

            batch = BatchRun(service, write)
            try:
                await batch.run(lines)
            except RunError as error:
                raise RunError(
                    f"{error}: the responses of {batch.num_done} of {total} requests are in "
                    f"{target}; run the others again"
                ) from error
            return total, batch.num_failed


class BatchRun:
    """Runs requests, at most NUM_RUNNING at a time. write: gets the line of each response."""

    def __init__(self, service: Service, write: Callable[[bytes], None]) -> None:
        self.service = service
        self.num_done = self.num_failed = 0
        self._write = write
        self._places = asyncio.Semaphore(NUM_RUNNING)
        self._line_of: dict[str, int] = {}

    async def run(self, lines: Iterable[bytes]) -> None:
        """Raises RunError if no engine is left, or a response cannot be written."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for number, line in enumerate(lines, 1):
                    if line.strip():
                        await self._places.acquire()
                        tasks.create_task(self._answer(number, line))
        except* (EngineDead, OSError) as errors:
            raise RunError(str(errors.exceptions[0])) from errors

    async def _answer(self, number: int, line: bytes) -> None:
        name = uuid.uuid4().hex
        try:
            request = self._read(number, line)
            try:
                status, body = 200, await self._respond(request, name)
            except APIError as error:
                status, body = error.status, msgspec.json.encode(error.body())
            response = {"status_code": status, "request_id": name, "body": msgspec.Raw(body)}
            result = result_line(name, request.custom_id, response=response)
            self.num_failed += status != 200
        except LineError as error:
            fields = {"code": "invalid_line", "message": f"line {number}: {error}"}
            result = result_line(name, error.custom_id, error=fields)
            self.num_failed += 1
        finally:
            self._places.release()
        self._write(result)
        self.num_done += 1

    def _read(self, number: int, line: bytes) -> BatchRequest:
        try:
            scan_json(line, self.service.model.max_len)
        except ValueError as error:
            raise LineError(str(error)) from error
        request = read_request(line)
        first = self._line_of.setdefault(request.custom_id, number)
        if first != number:
            text = f"custom_id is also that of line {first}, expected a different one in each line"
            raise LineError(text, request.custom_id)
        if request.url not in ENDPOINTS:
            text = f"url is {request.url!r:.80}, expected {', '.join(ENDPOINTS)}"
            raise LineError(text, request.custom_id)
        return request

    async def _respond(self, request: BatchRequest, name: str) -> bytes:
        """The body of the response. Raises APIError, or EngineDead if no engine is left."""
        while True:
            try:
                return await self._call(request, name)
            except Exception as error:  # of one request: its response says what failed
                if isinstance(error, EngineDead) and not isinstance(error, EngineLost):
                    raise
                answer = _answer_to(error, name)
                retry_after = answer.headers.get("Retry-After")
                if retry_after is None:
                    raise answer from error
            await asyncio.sleep(max(float(retry_after), 0.1))

    async def _call(self, request: BatchRequest, name: str) -> bytes:
        model, endpoint = ENDPOINTS[request.url]
        if request.body.get("stream"):
            raise invalid("stream is true, but a batch has no streams: leave it out", "stream")
        reservation = ImageReservation(self.service.image_budget)
        state = {"request_id": name, "headers": {}, STATE: reservation}
        http_request = Request(
            {"type": "http", "method": "POST", "headers": [], "state": state}, _never_disconnects
        )
        try:
            body = model.model_validate(request.body)
            check_unknown_fields(body, http_request, strict=self.service.config.strict_requests)
            return bytes((await endpoint(self.service, body, http_request)).body)
        finally:
            reservation.release()


def _answer_to(error: Exception, name: str) -> APIError:
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        return invalid_field([str(part) for part in first["loc"]], first["msg"])
    if isinstance(error, UnicodeError):
        return invalid("the body has text that is not valid Unicode, such as a lone surrogate")
    answer = client_error(error)
    if answer.status == 500 and not isinstance(error, APIError):
        log.error("request %s failed", name, exc_info=error)
    return answer


async def _never_disconnects() -> NoReturn:
    await asyncio.Event().wait()
    raise AssertionError("nothing sets this event")
