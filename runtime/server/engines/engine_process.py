"""The engine process: receives commands, runs engine steps and sends the outputs."""

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import parent_process
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import zmq
from tqdm import tqdm

from atomc.files.atomic_file import write_atomically
from atomc.options import let_openmp_sleep
from atomc.runtime.config import EngineConfig
from atomc.runtime.processes.garbage_collection import freeze_heap, frozen_imports
from atomc.runtime.processes.stderr_log import exit_process, log_to_stderr
from atomc.runtime.ranks.endpoint import use_tcp
from atomc.runtime.ranks.rank_failed import RankFailed
from atomc.runtime.ranks.rank_launcher import RankLauncher, place_of
from atomc.runtime.server.engines import ipc
from atomc.runtime.server.engines.compile_queue import CompileQueue, CompileUnavailable
from atomc.runtime.server.engines.control_calls import ControlCall, ControlCalls, Reply
from atomc.runtime.server.engines.ipc import EngineFailure, Progress, Refused, Submit
from atomc.torch_compat.exceptions import is_failure

if TYPE_CHECKING:
    from atomc.runtime.engine import Engine
    from atomc.runtime.requests.request import Output

log = logging.getLogger("atomc.engine")
LINGER_MS = 2000
COMMANDS_SECONDS = 0.005
# How often an idle engine polls for finished compiles, and for failures of other ranks.
POLL_COMPILE_MS, POLL_RANKS_MS = 5, 250
FRONTEND_CORES = 1  # cores left to the frontend process


@dataclass(frozen=True)
class EngineStart:
    """How an engine starts.

    environment     variables that only its process has
    progress        whether it shows progress bars
    rank_launcher   starts its other ranks; None: as processes of this host
    """

    config: EngineConfig
    environment: Mapping[str, str] = field(default_factory=dict)
    progress: bool = True
    rank_launcher: RankLauncher | None = None


def run_engine_process(start: EngineStart, address: str, failure_file: Path) -> None:
    """The entry point of the process: starts an engine, serves the frontend at `address`, and exits
    with the frontend.

    failure_file   gets the reason if a rank fails and the engine's thread cannot send it
    """
    os.environ.update(start.environment)  # before torch is imported
    # Ctrl-C reaches all processes of the terminal, and SIGTERM all processes of a service; the
    # frontend handles them.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    failed = run_engine(
        start, address, lambda reason: write_atomically(failure_file, reason.encode())
    )
    if failed:
        # Skip the interpreter's cleanup, which a failed device can block.
        exit_process(1)
    logging.shutdown()  # which multiprocessing does not call


def run_engine(
    start: EngineStart,
    address: str,
    report_failure: Callable[[str], None],
    host: str | None = None,
) -> bool:
    """Start an engine, and serve the frontend at `address`. Returns False after Stop; True if the
    engine failed, after reporting the error to the frontend.

    report_failure   called with the reason if a rank fails and this thread cannot send it; the
                     process then exits
    host             the name of this machine, if the frontend may be on another one
    """
    let_openmp_sleep()  # before torch is imported
    # tqdm's default lock is a system semaphore, which leaks if the process is killed.
    tqdm.set_lock(threading.RLock())
    log_to_stderr()
    socket = zmq.Context().socket(zmq.PAIR)
    # No limit, so that nothing is dropped or blocks; the accepted requests bound the number of
    # messages.
    socket.set_hwm(0)
    socket.linger = LINGER_MS
    if address.startswith("tcp:"):
        use_tcp(socket, address)
    socket.connect(address)

    def exit_with(failure: RankFailed) -> None:
        report_failure(str(failure))
        exit_process(1)

    try:
        with frozen_imports():
            from atomc.runtime.engine import Engine

        engine = Engine(
            start.config,
            progress=start.progress,
            spare_cores=FRONTEND_CORES,
            on_rank_failure=exit_with,
            rank_launcher=start.rank_launcher,
        )
        try:
            EngineLoop(engine, socket, place_of(os.getpid(), host)).run()
        finally:
            engine.close()
    except BaseException as error:  # every error must be reported to the frontend
        if not is_failure(error):
            raise
        message = _user_error_message(error)
        by_user = message is not None
        if isinstance(error, RankFailed):  # which is in the log
            message, by_user = str(error), error.by_user
        if message is None:
            log.exception("the engine failed")
        failed = EngineFailure(message or f"the engine failed: {type(error).__name__}", by_user)
        socket.send(msgspec.msgpack.encode(failed))
        return True
    finally:
        socket.close()
        socket.context.term()
    return False


def _exit_with_parent() -> None:
    """Exits this process when the frontend has ended, even during a step."""
    parent = parent_process()
    assert parent is not None
    wait([parent.sentinel])
    exit_process(1)


def _user_error_message(error: BaseException) -> str | None:
    """The message of an error that a user can fix; None for other errors."""
    from atomc.errors import RunError
    from atomc.torch_compat.exceptions import out_of_memory

    inner = getattr(error, "inner_exception", None)
    if inner is not None:
        return _user_error_message(inner)
    if out_of_memory(error):
        return (
            "out of memory on the device: lower --gpu-memory-utilization, --max-num-seqs, "
            "--max-num-batched-tokens or --max-model-len"
        )
    by_user = isinstance(error, ValueError | OSError | ImportError | RunError)
    return " ".join(str(error).split()) if by_user else None


class EngineLoop:
    """Receives commands, runs one engine step, sends the progress; sleeps while there is no
    work. place: where it runs, for the log.
    """

    def __init__(self, engine: "Engine", socket: "zmq.Socket[bytes]", place: str) -> None:
        self.engine = engine
        self.socket = socket
        self.place = place
        self.compile_queue = CompileQueue(engine)
        self.calls = ControlCalls(engine, lambda: self.compile_queue.is_busy)
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(ipc.EngineCommand).decode
        self._progress = Progress()
        self._unanswered: set[str] = set()  # accepted requests without an output
        self._idle_ms = POLL_RANKS_MS if engine.config.num_ranks > 1 else None

    def run(self) -> None:
        """Runs until a Stop command."""
        freeze_heap()
        stats = self.engine.stats()
        self._send(
            ipc.Started(
                model=self.engine.program.report.model,
                device=str(self.engine.program.device),
                max_len=self.engine.max_len,
                vocab_size=self.engine.vocab_size,
                kv_tokens=stats.kv_tokens,
                num_sequences=stats.kv_tokens // self.engine.max_len,
                phases=self.engine.phases,
                threads=str(self.engine.threads or ""),
                place=self.place,
                ranks=dict(self.engine.executor.places),
            )
        )
        while True:
            for command in self._receive_commands():
                if isinstance(command, ipc.StopEngine):
                    return
                self._handle(command)
            until = time.monotonic() + COMMANDS_SECONDS
            for submit, error in self.compile_queue.completed():
                self._submit(submit, error)
                if time.monotonic() > until:
                    break
            self.engine.executor.raise_failure()
            if self.engine.has_work:
                self._add_outputs(self.engine.step())
            if self._progress != Progress():
                self._send(self._progress)
                self._progress = Progress()

    def _add_outputs(self, outputs: "Sequence[Output]") -> None:
        progress, unanswered = self._progress, self._unanswered
        for output in outputs:
            is_token = output.finish_reason is None and output.logprobs is None
            # A token that follows an output of the same message is an output, too.
            if is_token and len(output.token_ids) == 1 and output.request_id not in unanswered:
                progress.ids.append(output.request_id)
                progress.tokens.append(output.token_ids[0])
            else:
                unanswered.add(output.request_id)
                progress.outputs.append(output)
        unanswered.difference_update([output.request_id for output in progress.outputs])

    def _receive_commands(self) -> Iterator[ipc.EngineCommand]:
        """The commands that have arrived; blocks for one if there is nothing to do."""
        if not self.engine.has_work and not self.engine.capture_graph():
            self.socket.poll(POLL_COMPILE_MS if self.compile_queue else self._idle_ms)
        # Limited in time, so that running requests progress while many new ones arrive.
        until = time.monotonic() + COMMANDS_SECONDS
        while time.monotonic() < until:
            try:
                message = self.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            yield self._decode(message)

    def _handle(self, command: ipc.EngineCommand) -> None:
        match command:
            case Submit():
                if self.engine.is_sleeping or not self.compile_queue.enqueue(command):
                    self._submit(command)
            case ipc.Abort(ids):
                self.compile_queue.drop(ids)
                self._unanswered.difference_update(ids)
                for request_id in ids:
                    self.engine.abort(request_id)
            case ControlCall():
                self._run_call(command)

    def _run_call(self, call: ControlCall) -> None:
        try:
            reply = self.calls.run(call)
        except Exception as error:
            user_error = isinstance(error, ValueError) and call.name != "reset_prefix_cache"
            # These finish a step: an error of that ends the engine, as in `step`.
            if not user_error and call.name in ("reset_prefix_cache", "sleep"):
                raise
            if not user_error:  # fails this call only; requests continue
                log.exception("%s failed", call.name)
            reply = Reply(call.number, error=str(error) if user_error else f"{call.name} failed")
        self._send(reply)

    def _submit(self, command: Submit, error: Exception | None = None) -> None:
        """Add a request to the engine, or reject it if its compile ended with `error`."""
        from atomc.runtime.requests.request_errors import RequestFailed
        from atomc.runtime.scheduling.scheduler import QueueFull
        from atomc.runtime.sleeping import EngineAsleep

        try:
            if error is not None:
                raise error
            fields = msgspec.structs.asdict(command)
            self.engine.add(self.engine.request(fields.pop("id"), **fields))
        except (ValueError, ImportError) as error:
            refused = Refused(command.id, str(error))
        except RequestFailed as error:
            refused = Refused(command.id, str(error), by_client=error.error.by_client)
        except (EngineAsleep, QueueFull, CompileUnavailable) as error:
            asleep = isinstance(error, EngineAsleep)
            refused = Refused(command.id, str(error), error.retry_after, asleep=asleep)
        else:
            self._progress.accepted.append(command.id)
            self._unanswered.add(command.id)
            return
        self._progress.refused.append(refused)

    def _send(self, event: ipc.EngineEvent) -> None:
        self.socket.send(self._encode(event))
