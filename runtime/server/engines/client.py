"""The frontend's client of the engine process: sends requests, receives outputs and detects that
the engine has died.
"""

import asyncio
import contextlib
import shutil
import signal
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import count
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Protocol

import msgspec
import zmq
import zmq.asyncio

from atomc.runtime.config import EngineConfig
from atomc.runtime.requests.request import Output
from atomc.runtime.scheduling.stats import Stats
from atomc.runtime.server.engines import ipc
from atomc.runtime.server.engines.control_calls import CallName, ControlCall, Reply
from atomc.runtime.server.engines.engine_process import EngineStart, run_engine_process
from atomc.runtime.server.engines.ipc import EngineFailure, Progress, Refused, Started, Submit
from atomc.runtime.server.engines.request_stream import RequestStream

PING_SECONDS = 2.0
HISTORY_SECONDS = 180.0
STOP_SECONDS = 1.5
MEMORY_FLAGS = "--kv-bytes, --max-num-seqs or --max-model-len"


class EngineDead(Exception):
    """The engine process has ended or is ending."""


class ShuttingDown(EngineDead):
    """The server is shutting down."""

    def __init__(self) -> None:
        super().__init__("the server is shutting down")


class EngineRestarting(EngineDead):
    """The engine process is being restarted. retry_after: estimated seconds until it is ready."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class EngineLost(EngineDead):
    """The engine of this request has ended, and another one serves or is being restarted."""


class EngineFailed(Exception):
    """The engine did not start. by_user: the message describes an error that a user can fix."""

    def __init__(self, message: str, by_user: bool) -> None:
        super().__init__(message)
        self.by_user = by_user


class RequestRefused(Exception):
    """The engine rejected a request. retry_after: seconds after which to retry, None: never.
    by_client, asleep: as in Refused.
    """

    def __init__(self, refused: Refused) -> None:
        super().__init__(refused.message)
        self.retry_after, self.by_client = refused.retry_after, refused.by_client
        self.asleep = refused.asleep


class EngineHandle(Protocol):
    """What the frontend needs of whatever runs an engine: a process of its own, or an actor of Ray.
    It starts at once, before the frontend's slow imports; `close` ends it.

    label      its process, or its actor, for the log
    sentinel   a file descriptor that becomes readable when the engine has ended
    """

    config: EngineConfig
    label: str
    sentinel: int

    @property
    def exitcode(self) -> int | None:
        """Of its process, negative for a signal; None while it runs, and if it is not known."""

    @property
    def failure(self) -> str | None:
        """Why the engine has ended, if it could not send the reason to the socket."""

    def bind(self, socket: zmq.asyncio.Socket) -> None:
        """Bind the frontend's socket, which the engine connects to."""

    def kill(self) -> None:
        """End the engine if it still runs; does not wait."""

    def close(self, timeout: float = 0.0) -> None:
        """Wait up to `timeout` seconds for the engine to end, then kill it."""

    def restarted(self) -> "EngineHandle":
        """A new engine like this one, which has ended."""


class EngineProcess:
    """A process of this host that runs an engine; an EngineHandle."""

    def __init__(self, start: EngineStart) -> None:
        self.config, self._start = start.config, start
        # mkdtemp creates a directory that only this user can access.
        self.folder = Path(tempfile.mkdtemp(prefix="atomc-"))
        self.address = f"ipc://{self.folder / 'engine'}"
        self._failure_file = self.folder / "failure"
        self.process: BaseProcess = get_context("spawn").Process(
            target=run_engine_process,
            args=(start, self.address, self._failure_file),
            name="atomc engine",
            daemon=True,
        )
        self.process.start()
        self.label, self.sentinel = str(self.process.pid), self.process.sentinel

    def bind(self, socket: zmq.asyncio.Socket) -> None:
        socket.bind(self.address)

    def restarted(self) -> "EngineProcess":
        return EngineProcess(replace(self._start, config=self.config, progress=False))

    @property
    def exitcode(self) -> int | None:
        self.process.join()
        return self.process.exitcode

    def close(self, timeout: float = 0.0) -> None:
        self.process.join(timeout)
        self.kill()
        self.process.join()

    @property
    def failure(self) -> str | None:
        with contextlib.suppress(FileNotFoundError):
            return self._failure_file.read_text()
        return None

    def kill(self) -> None:
        self.process.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


class EngineClient:
    """The connection to an engine process, for one event loop. `await connect()` first, `await
    close()` last.

    name            in messages
    info            what the engine reported when it was ready, start_seconds after the start
    stats           the last stats, at most PING_SECONDS old while the engine responds; None before
                    the first
    stats_time      time.monotonic of `stats`
    token_history   (time, generated tokens) of the stats of the last HISTORY_SECONDS
    health_timeout  seconds without a response after which unhealthy_reason is set
    dead            why there is no engine, None while there is one; `died_event` is set with it
    on_death        converts the reason to the error that requests get, such as EngineRestarting
    """

    info: Started
    start_seconds: float

    def __init__(
        self, engine: EngineHandle, *, name: str = "the engine", health_timeout: float = 60.0
    ) -> None:
        self.name, self.health_timeout = name, health_timeout
        self.stats: Stats | None = None
        self.stats_time = time.monotonic()
        self.token_history: deque[tuple[float, int]] = deque()
        self.dead: EngineDead | None = None
        self.died_event = asyncio.Event()
        self.on_death: Callable[[EngineDead], EngineDead] = lambda why: why
        self.writing_profile = False
        self.restarts = 0
        self._streams: dict[str, RequestStream] = {}
        self._calls: dict[int, asyncio.Future[str]] = {}
        self._numbers = count()
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(ipc.EngineEvent).decode
        # Its own thread: chat templates that do not end may occupy the default executor.
        self._closer = ThreadPoolExecutor(1)
        self._attach(engine)

    def _attach(self, engine: EngineHandle) -> None:
        """Bind the socket that this engine connects to."""
        self.engine = engine
        self._attached = time.monotonic()
        self._ping_sent: float | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._started: asyncio.Future[Started] = asyncio.get_running_loop().create_future()
        self._socket = zmq.asyncio.Context().socket(zmq.PAIR)
        self._socket.set_hwm(0)
        self._socket.linger = 0
        engine.bind(self._socket)

    async def connect(self) -> None:
        """Returns when the engine is ready. Raises EngineFailed if it cannot start."""
        asyncio.get_running_loop().add_reader(
            self.engine.sentinel, self._handle_sentinel, self.engine
        )
        self._tasks.append(asyncio.create_task(self._receive()))
        self.info = await self._started
        self.start_seconds = time.monotonic() - self._attached
        self.dead = None
        self.died_event.clear()
        self.token_history.clear()
        self._tasks.append(asyncio.create_task(self._ping()))
        await self.call("stats")

    async def restart(self) -> None:
        """Replace a dead process by a new one. Raises EngineFailed if it cannot start."""
        assert self.dead is not None, "the engine is running"
        await self._detach(0.0)
        self._attach(self.engine.restarted())
        await self.connect()
        self.restarts += 1

    def kill_engine(self, why: str) -> None:
        """Kill the engine process; requests fail as if it had died."""
        self._mark_dead(EngineDead(why))
        self.engine.kill()

    async def close(self) -> None:
        """Ends the engine process; running requests fail."""
        is_serving = self.dead is None and hasattr(self, "info")
        if is_serving:
            self._send(ipc.StopEngine())
        self._mark_dead(ShuttingDown())
        # A process that is still starting does not read commands: kill it at once.
        await self._detach(STOP_SECONDS if is_serving else 0.0)
        self._closer.shutdown()

    async def _detach(self, timeout: float) -> None:
        """Ends the process, killing it after `timeout` seconds, and closes its socket and tasks."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(self.engine.sentinel)
        await loop.run_in_executor(self._closer, self.engine.close, timeout)
        for task in self._tasks:
            task.cancel()
        self._socket.close()
        self._socket.context.term()

    @property
    def unanswered_seconds(self) -> float:
        """Seconds since the oldest ping without a response; 0 if there is none."""
        return time.monotonic() - self._ping_sent if self._ping_sent is not None else 0.0

    @property
    def unhealthy_reason(self) -> str | None:
        """Why the engine cannot serve requests; None if it can."""
        if self.dead is not None:
            return str(self.dead)
        seconds = self.unanswered_seconds
        return (
            f"{self.name} has not answered for {seconds:.0f} s"
            if seconds > self.health_timeout
            else None
        )

    @property
    def num_unfinished(self) -> int:
        """Number of requests that wait or run."""
        return len(self._streams)

    def submit(self, requests: Sequence[Submit], stream: RequestStream) -> None:
        """Send requests to the engine; their outputs go to this stream. Raises EngineDead."""
        self._check()
        for request in requests:
            self._streams[request.id] = stream
            self._send(request)

    def abort(self, ids: Iterable[str]) -> None:
        """Abort these requests; finished ones are ignored."""
        running = [
            request_id for request_id in ids if self._streams.pop(request_id, None) is not None
        ]
        if running and self.dead is None:
            self._send(ipc.Abort(running))

    def abort_all(self) -> None:
        """Abort all requests, for the shutdown; their streams raise ShuttingDown."""
        streams = {id(stream): stream for stream in self._streams.values()}.values()
        self.abort(list(self._streams))
        for stream in streams:
            stream.fail(ShuttingDown())

    async def call(self, name: CallName, *args: str) -> str:
        """The engine's reply. Raises EngineDead, or ValueError with the engine's message."""
        self._check()
        number = next(self._numbers)
        future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._calls[number] = future
        self._send(ControlCall(number, name, args))
        self.writing_profile |= name == "stop_profile"
        try:
            return await future
        finally:
            self._calls.pop(number, None)
            self.writing_profile &= name != "stop_profile"

    def _check(self) -> None:
        if self.dead is not None:
            raise self.dead

    def _send(self, command: ipc.EngineCommand) -> None:
        # The socket has no high-water mark, so the returned future is already done.
        self._socket.send(self._encode(command))

    async def _receive(self) -> None:
        while True:
            self._handle(self._decode(await self._socket.recv()))

    def _handle(self, event: ipc.EngineEvent) -> None:
        match event:
            case Progress():
                self._handle_progress(event)
            case Reply(number, value, error, stats):
                if stats is not None:
                    self._record_stats(stats)
                future = self._calls.get(number)
                if future is not None and not future.done():
                    if error is None:
                        future.set_result(value)
                    else:
                        future.set_exception(ValueError(error))
            case Started():
                if not self._started.done():  # cancelled, if another engine could not start
                    self._started.set_result(event)
            case EngineFailure(message, by_user):
                if not self._started.done():
                    self._started.set_exception(EngineFailed(message, by_user))
                self._mark_dead(EngineDead(message))

    def _handle_progress(self, event: Progress) -> None:
        for request_id in event.accepted:
            if (stream := self._streams.get(request_id)) is not None:
                stream.accept(request_id)
        for refused in event.refused:
            if (stream := self._streams.pop(refused.id, None)) is not None:
                stream.fail(RequestRefused(refused))
        for request_id, token in zip(event.ids, event.tokens, strict=True):
            if (stream := self._streams.get(request_id)) is not None:
                stream.put(Output(request_id, (token,)))
        for output in event.outputs:
            stream = self._streams.get(output.request_id)
            if stream is None:
                continue
            if output.finish_reason is not None:
                del self._streams[output.request_id]
            stream.put(output)

    def _record_stats(self, stats: Stats) -> None:
        self.stats_time = now = time.monotonic()
        self.stats = stats
        self.token_history.append((now, stats.generated_tokens))
        while self.token_history[0][0] < now - HISTORY_SECONDS:
            self.token_history.popleft()

    async def _ping(self) -> None:
        with contextlib.suppress(EngineDead):
            while True:
                await asyncio.sleep(PING_SECONDS)
                self._ping_sent = time.monotonic()
                await self.call("stats")
                self._ping_sent = None

    def _handle_sentinel(self, engine: EngineHandle) -> None:
        asyncio.get_running_loop().remove_reader(engine.sentinel)
        # Its last messages may not have been received yet.
        asyncio.get_running_loop().call_later(0.1, self._handle_exit, engine)

    def _handle_exit(self, engine: EngineHandle) -> None:
        if engine is not self.engine:  # a restart has replaced it
            return
        exitcode = engine.exitcode
        how = (
            f"was killed by signal {-exitcode}"
            if exitcode and exitcode < 0
            else "ended"
            if exitcode is None
            else f"ended with code {exitcode}"
        )
        if not self._started.done():
            # The kernel's OOM killer sends SIGKILL.
            why = (
                f", perhaps for lack of memory: lower {MEMORY_FLAGS}"
                if exitcode == -signal.SIGKILL
                else ""
            )
            message = engine.failure or f"{self.name}'s process {how} while it started{why}"
            self._started.set_exception(EngineFailed(message, False))
        self._mark_dead(EngineDead(engine.failure or f"{self.name}'s process {how}"))

    def _mark_dead(self, why: EngineDead) -> None:
        if self.dead is None:
            self.dead = why = why if isinstance(why, ShuttingDown) else self.on_death(why)
            self.died_event.set()
            streams, self._streams = list(self._streams.values()), {}
            for stream in streams:
                stream.fail(why)
            for future in self._calls.values():
                if not future.done():
                    future.set_exception(why)
