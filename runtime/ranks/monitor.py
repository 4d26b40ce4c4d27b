"""Watches the other ranks of a model, from a thread of rank 0, and ends the group if one fails.

A rank fails if its process ends, if it is silent (its pulse comes from a thread of its own), if a
command raises in it but not in all ranks, if a step takes too long, or if its tokens differ.
"""

import logging
import shutil
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import zmq

from atomc.errors import first_line
from atomc.runtime.execution.executor import StepResults
from atomc.runtime.ranks import messages
from atomc.runtime.ranks.endpoint import bind
from atomc.runtime.ranks.messages import Command, CommandFailed, Done, Pulse, results_digest
from atomc.runtime.ranks.process_group import abort_collectives, leave
from atomc.runtime.ranks.rank_failed import FailureHandler, RankFailed
from atomc.runtime.ranks.rank_launcher import RankHandle, place_of

log = logging.getLogger("atomc")
TICK_SECONDS = 0.2
# A thread gets no pulse out while a call into C holds the GIL, which takes longer while weights are
# read or something is compiled.
SILENT_SECONDS = 5.0
SILENT_SECONDS_OF_COMPILING = 120.0
# If this thread did not run for so long, the whole group was stopped.
STOPPED_SECONDS = 2.0
# After a step, or a command that compiles, failed in one rank, the others have this long to fail.
ALIKE_SECONDS = 3.0
ALIKE_SECONDS_OF_COMPILING = 8.0
# After a failure, the engine has this long to raise it, until on_failure is called.
RAISE_SECONDS = 2.0
STOP_SECONDS = 1.0
DIGESTS_KEPT = 4096


class Monitor:
    """Sends commands to the other ranks of a group of `size`, and watches them. Call `close` at the
    end.

    host          as in RankLauncher
    commands      the address of each rank's socket; reports: of the one that all send to
    step_seconds  maximum duration of a step, unless something is compiled
    on_failure    called in a thread of its own if the failure is not raised within RAISE_SECONDS:
                  the engine compiles, or waits for a device
    started       whether the start is over: from then on no step compiles
    """

    def __init__(
        self,
        size: int,
        step_seconds: float,
        on_failure: FailureHandler | None = None,
        *,
        host: str | None = None,
    ) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="atomc-ranks-"))
        self.started = False
        self._others = range(1, size)
        self._step_seconds = step_seconds
        self._on_failure = on_failure
        self._handles: Mapping[int, RankHandle] = {}
        self._failure: RankFailed | None = None
        self._raised, self._closing = threading.Event(), threading.Event()
        # Guards everything below, which two threads use.
        self._changed = threading.Condition()
        self._number = messages.FIRST_COMMAND
        self._seen = dict.fromkeys(self._others, time.monotonic())
        self._pulses: dict[int, Pulse] = {}
        self._done: dict[int, dict[int, Done]] = defaultdict(dict)
        self._failed: dict[int, dict[int, CommandFailed]] = defaultdict(dict)
        self._failed_at: dict[int, float] = {}
        self._failed_here: set[int] = set()
        # Commands that rank 0 executes now: when they began, and whether they are a part of a step.
        self._running: dict[int, tuple[float, bool]] = {}
        self._collected = self._digest = 0
        self._digests: dict[int, int] = {}
        self._encode = msgspec.msgpack.Encoder().encode
        self._context = zmq.Context()
        self._sockets = {rank: self._socket(zmq.PUSH) for rank in self._others}
        self._disconnects = {
            rank: socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            for rank, socket in self._sockets.items()
        }
        self.commands = {
            rank: bind(socket, self._folder / f"rank{rank}", host)
            for rank, socket in self._sockets.items()
        }
        self._reports = self._socket(zmq.PULL)
        self.reports = bind(self._reports, self._folder / "reports", host)
        self._thread = threading.Thread(target=self._watch, name="ranks", daemon=True)

    def _socket(self, kind: int) -> "zmq.Socket[bytes]":
        socket = self._context.socket(kind)
        # No limit, so that nothing blocks; the engine waits for the results of steps.
        socket.set_hwm(0)
        socket.linger = 0
        return socket

    def watch(self, handles: Mapping[int, RankHandle]) -> None:
        """Watch the other ranks, which have been started."""
        self._handles = handles
        self._thread.start()

    @property
    def handles(self) -> Mapping[int, RankHandle]:
        return self._handles

    # For the threads of the engine

    def raise_failure(self) -> None:
        """Raise RankFailed if the group has failed."""
        if self._failure is not None:
            self._raised.set()
            raise RankFailed(str(self._failure), by_user=self._failure.by_user)

    @contextmanager
    def sending(self, command: Callable[[int], Command], *, of_step: bool = False) -> Iterator[int]:
        """Send a command to the other ranks, which rank 0 executes in this context; its number.

        If it raises in rank 0 and in all others, so does this; if not in all, RankFailed.
        """
        self.raise_failure()
        with self._changed:
            number, self._number = self._number, self._number + 1
            self._running[number] = time.monotonic(), of_step
            self._send(command(number))
        with self.executing(number):
            yield number

    def _send(self, command: Command) -> None:
        message = self._encode(command)
        for socket in self._sockets.values():
            with suppress(zmq.Again):  # the rank has ended, which `_watch` notices
                socket.send(message, zmq.NOBLOCK)

    @contextmanager
    def executing(self, number: int) -> Iterator[None]:
        """Rank 0 executes this command in this context, as `sending` does."""
        with self._changed:
            self._running.setdefault(number, (time.monotonic(), False))
        try:
            yield
        except Exception as error:
            self._raise_unless_alike(number, error)
            raise
        finally:
            with self._changed:
                del self._running[number]
        self.raise_failure()  # collectives that were aborted return nonsense

    def _raise_unless_alike(self, number: int, error: Exception) -> None:
        """After a command raised in rank 0, raise RankFailed if another rank is the cause, or
        unless it raises in all ranks. During the start, the caller ends the other ranks.
        """
        with self._changed:
            self._failed_here.add(number)
            self._changed.wait_for(
                lambda: self._failure or len(self._failed[number]) == len(self._others),
                self._alike_seconds(number),
            )
            alike = len(self._failed[number]) == len(self._others)
            if self._failure is None and (alike or not self.started):
                self._failed_here.remove(number)
                self._failed.pop(number)
                self._failed_at.pop(number, None)
                return
        message = f"{type(error).__name__}: {first_line(error)}"
        self._fail(f"rank 0 failed, and others did not: {message}")
        try:
            self.raise_failure()
        except RankFailed as failure:
            raise failure from error

    def _alike_seconds(self, number: int) -> float:
        _, of_step = self._running.get(number, (0.0, False))
        return ALIKE_SECONDS if of_step else ALIKE_SECONDS_OF_COMPILING

    def wait_done(self, number: int, ranks: Sequence[int] | None = None) -> list[Done]:
        """What these ranks, by default all others, answer to a command; waits for them. Raises
        RankFailed.
        """
        ranks = self._others if ranks is None else ranks
        with self._changed:
            self._changed.wait_for(lambda: self._failure or self._done[number].keys() >= set(ranks))
            done = self._done.pop(number, {})
        self.raise_failure()
        return [done[rank] for rank in ranks]

    def collected(self, results: StepResults) -> None:
        """Note the results of a step: those of the other ranks must be equal."""
        with self._changed:
            self._collected += 1
            self._digest = results_digest(self._digest, results)
            self._digests[self._collected] = self._digest
            self._digests.pop(self._collected - DIGESTS_KEPT, None)

    def end_watch(self) -> None:
        """Watch no more; returns when what follows a failure is done."""
        self._closing.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    def close(self) -> None:
        """End the other ranks, and leave the process group."""
        self.end_watch()
        with self._changed:
            self._send(messages.StopRank())
        until = time.monotonic() + STOP_SECONDS
        for rank in self._handles:  # it closes its connection
            self._disconnects[rank].poll(round(1e3 * max(until - time.monotonic(), 0.0)))
        self._kill()
        leave()
        self._context.destroy(linger=0)
        shutil.rmtree(self._folder, ignore_errors=True)

    # For the thread that watches

    def _watch(self) -> None:
        before = time.monotonic()
        while not self._closing.is_set():
            self._receive()
            now = time.monotonic()
            with self._changed:
                if now - before > STOPPED_SECONDS:
                    self._seen = dict.fromkeys(self._others, now)
                why = self._ended() or self._alone(now) or self._differs()
                why = why or self._silent(now) or self._overdue(now)
            before = now
            if why is not None:
                self._fail(*why)
            if self._failure is not None:
                break
        else:
            return
        self._kill()
        abort_collectives()
        if self._on_failure is not None and not self._raised.wait(RAISE_SECONDS):
            self._on_failure(self._failure)

    def _receive(self) -> None:
        """Read the reports that arrive within TICK_SECONDS."""
        self._reports.poll(round(1e3 * TICK_SECONDS))
        decoder = msgspec.msgpack.Decoder(messages.Report)
        with suppress(zmq.Again), self._changed:
            while True:
                report = decoder.decode(self._reports.recv(zmq.NOBLOCK))
                self._seen[report.rank] = time.monotonic()
                match report:
                    case Pulse(rank):
                        self._pulses[rank] = report
                    case Done(rank, number):
                        self._done[number][rank] = report
                    case CommandFailed(rank, number):
                        self._failed[number][rank] = report
                        self._failed_at.setdefault(number, time.monotonic())
                self._changed.notify_all()

    @property
    def _compiles(self) -> bool:
        """Whether ranks may be compiling: they start, or execute another command than a step."""
        return not (self.started and all(of_step for _, of_step in self._running.values()))

    def _ended(self) -> tuple[str] | None:
        """A rank whose process has ended, or its connection: on another host, of which rank 0 may
        know nothing else.
        """
        for rank, handle in self._handles.items():
            if (how := handle.how_it_ended()) is not None:
                return (f"{self._name(rank)} {how}",)
            if handle.host is not None and self._disconnects[rank].poll(0):
                return (f"{self._name(rank)} closed its connection: it has ended",)
        return None

    def _alone(self, now: float) -> tuple[str, bool] | None:
        """A rank in which a command raised that did not raise in rank 0."""
        for number, ranks in self._failed.items():
            is_over = number not in self._running and number not in self._failed_here
            late = ranks and now - self._failed_at[number] > self._alike_seconds(number)
            if ranks and (is_over or late):
                failed = next(iter(ranks.values()))
                return f"{self._name(failed.rank)} failed: {failed.message}", failed.by_user
        return None

    def _differs(self) -> tuple[str] | None:
        """A rank that sampled other tokens than rank 0."""
        for rank, pulse in self._pulses.items():
            if self._digests.get(pulse.collected, pulse.digest) != pulse.digest:
                return (f"{self._name(rank)} sampled other tokens than rank 0",)
        return None

    def _silent(self, now: float) -> tuple[str] | None:
        """A rank that sends no pulse."""
        limit = SILENT_SECONDS_OF_COMPILING if self._compiles else SILENT_SECONDS
        for rank, seen in self._seen.items():
            if now - seen > limit:
                return (f"{self._name(rank)} has been silent for {now - seen:.0f} s: it hangs",)
        return None

    def _overdue(self, now: float) -> tuple[str] | None:
        """A rank that does not begin a step, or all, if a step does not end."""
        for number, (began, of_step) in self._running.items():
            if self._compiles or not of_step or now - began < self._step_seconds:
                continue
            late = [rank for rank, pulse in self._pulses.items() if pulse.began < number]
            limit = f"{self._step_seconds:g} s (--step-timeout)"
            if late:
                return (f"{self._name(late[0])} has not begun a step after {limit}",)
            return (f"no rank has completed a step after {limit}",)
        return None

    def _name(self, rank: int) -> str:
        handle = self._handles[rank]
        return f"rank {rank} ({place_of(handle.pid, handle.host)})"

    def _fail(self, why: str, by_user: bool = False) -> None:
        """The group has failed, unless it has before."""
        with self._changed:
            if self._failure is None:
                self._failure = RankFailed(why, by_user=by_user)
                log.error("%s; the other ranks are ended", why)
            self._changed.notify_all()

    def _kill(self) -> None:
        for handle in self._handles.values():
            handle.kill()
