"""A rank other than 0: executes the commands of rank 0 with a Worker of its own."""

import logging
import threading

import msgspec
import torch
import zmq
from torch import Tensor
from zmq.utils.monitor import recv_monitor_message

from atomc.errors import first_line
from atomc.runtime.execution.executor import Launched
from atomc.runtime.execution.timings import Phases
from atomc.runtime.execution.worker import Worker
from atomc.runtime.processes.garbage_collection import freeze_heap
from atomc.runtime.processes.stderr_log import exit_process
from atomc.runtime.ranks import messages
from atomc.runtime.ranks.endpoint import use_tcp
from atomc.runtime.ranks.messages import (
    IMPORTED,
    LOADED,
    CommandFailed,
    Done,
    Pulse,
    results_digest,
)
from atomc.runtime.ranks.process_group import connect_store, join, open_device
from atomc.runtime.ranks.rank_settings import RankSettings

log = logging.getLogger("atomc")
PULSE_SECONDS = 0.5
# The engine has at most one step in flight besides the one that it launches.
MAX_LAUNCHED = 2
# Rank 0 listens before it starts the others.
CONNECT_SECONDS = 60.0


class Rank:
    """Its progress, and its connection to rank 0."""

    def __init__(self, settings: RankSettings) -> None:
        self.settings = settings
        self._context = zmq.Context()
        self._commands = self._context.socket(zmq.PULL)
        self._commands.set_hwm(0)
        if settings.commands.startswith("tcp:"):
            use_tcp(self._commands, settings.commands)
            _exit_when_disconnected(self._commands, settings)
        self._commands.connect(settings.commands)
        self._decode = msgspec.msgpack.Decoder(messages.Command).decode
        self._began = IMPORTED
        # Number of steps whose results were read, and their digest: one value, for two threads.
        self._progress = 0, 0
        self._launched: dict[int, Launched] = {}
        threading.Thread(target=self._send_pulses, daemon=True).start()
        self._reports = self._reports_socket()

    def _reports_socket(self) -> "zmq.Socket[bytes]":
        """A socket to rank 0, for one thread."""
        socket = self._context.socket(zmq.PUSH)
        socket.set_hwm(0)
        if self.settings.reports.startswith("tcp:"):
            use_tcp(socket, self.settings.reports)
        socket.connect(self.settings.reports)
        return socket

    def _send_pulses(self) -> None:
        """The main loop of a thread."""
        socket, never = self._reports_socket(), threading.Event()
        while not never.wait(PULSE_SECONDS):
            _send(socket, Pulse(self.settings.rank, self._began, *self._progress))

    def run(self) -> None:
        """Load the model together with the other ranks, and execute commands until StopRank."""
        try:
            worker = self._load()
        except Exception as error:
            self._report(self._reports, self._began, error)
            threading.Event().wait()  # rank 0 ends this process
            raise
        freeze_heap()
        while True:
            command = self._decode(self._commands.recv())
            if isinstance(command, messages.StopRank):
                self._commands.close(linger=0)  # rank 0 waits for that
                return
            self._began = command.number
            try:
                self._execute(worker, command)
            except Exception as error:  # whether the group can go on is decided by rank 0
                self._report(self._reports, command.number, error)

    def _load(self) -> Worker:
        of = self.settings
        of.torch.apply()
        store = connect_store(of.store_host, of.store_port, of.config.num_ranks)
        device = torch.device(of.config.device or "cpu")
        open_device(device)
        _send(self._reports, Done(of.rank, IMPORTED))
        self._began = LOADED
        place = join(store, of.rank, device, of.config)
        worker = Worker(of.config, Phases((), progress=False), place=place)
        _send(self._reports, Done(of.rank, LOADED))
        return worker

    def _execute(self, worker: Worker, command: messages.Command) -> None:
        match command:
            case messages.Launch(number, step):
                self._launched[number] = worker.launch(step)
                while len(self._launched) > MAX_LAUNCHED:  # rank 0 has given up the oldest
                    del self._launched[min(self._launched)]
            case messages.SampleStep(_, step, mask, num_rows):
                self._launched[step].sample(_tensor(mask, num_rows))
            case messages.Collect(number, step):
                results = self._launched.pop(step).results()
                if worker.samples and self.settings.config.data_ranks == 1:
                    collected, digest = self._progress
                    self._progress = collected + 1, results_digest(digest, results)
                if self.settings.rank in self.settings.config.reporting_ranks:
                    _send(self._reports, Done(self.settings.rank, number, results))
            case messages.Control(number, "prepare_pooling"):
                threading.Thread(
                    target=self._prepare_pooling, args=(worker, number), daemon=True
                ).start()
            case messages.Control(number, "counts"):
                load = {path: list(counts) for path, counts in worker.counts().expert_load.items()}
                _send(self._reports, Done(self.settings.rank, number, expert_load=load))
            case messages.Control(number, method):
                getattr(worker, method)()
                _send(self._reports, Done(self.settings.rank, number))

    def _prepare_pooling(self, worker: Worker, number: int) -> None:
        """The work of a thread."""
        socket, device = self._reports_socket(), worker.program.device
        try:
            if device.type == "cuda":
                torch.cuda.set_device(device)  # a thread begins with the first
            worker.prepare_pooling()
        except Exception as error:
            self._report(socket, number, error)
        else:
            _send(socket, Done(self.settings.rank, number))

    def _report(self, socket: "zmq.Socket[bytes]", number: int, error: Exception) -> None:
        log.error("command %d failed", number, exc_info=error)
        by_user = isinstance(error, ValueError | OSError | ImportError)
        message = f"{type(error).__name__}: {first_line(error)}"
        _send(socket, CommandFailed(self.settings.rank, number, message, by_user))


def _exit_when_disconnected(socket: "zmq.Socket[bytes]", settings: RankSettings) -> None:
    """End this process when the socket, which is connected afterwards, does not reach rank 0 within
    CONNECT_SECONDS or loses its connection, even during a step: from another host, rank 0 cannot
    end it.
    """
    events = socket.get_monitor_socket(zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED)

    def watch() -> None:
        if events.poll(round(1e3 * CONNECT_SECONDS)):
            recv_monitor_message(events)  # that it is connected
            events.poll()
            log.error("the connection to rank 0 is closed; this rank ends")
        else:
            log.error(
                "rank %d has not reached rank 0 at %s within %g s: rank 0 has ended, or this host "
                "cannot connect to it; this rank ends",
                settings.rank,
                settings.commands,
                CONNECT_SECONDS,
            )
        exit_process(1)

    threading.Thread(target=watch, daemon=True).start()


def _tensor(mask: bytes | None, num_rows: int) -> Tensor | None:
    if mask is None:
        return None
    rows = torch.frombuffer(bytearray(mask), dtype=torch.int32).view(num_rows, -1)
    # Otherwise, its copy to the device would make the host wait for the forward pass.
    return rows.pin_memory() if torch.cuda.is_available() else rows


def _send(socket: "zmq.Socket[bytes]", report: messages.Report) -> None:
    socket.send(msgspec.msgpack.encode(report))
