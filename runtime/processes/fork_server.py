"""A process that answers each connection in a fork of its own, for parsers of what clients send.

Such a parser can take minutes and gigabytes, or crash. Its fork has limits, and ends with the
connection: closing it stops the work.
"""

import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from atomc.files.json_types import JSONObject
from atomc.runtime.processes.garbage_collection import freeze_heap

# Lower the priority of forks.
NICE = 10
# Wall-clock limits for a connection to be accepted: by a process that starts, and by one that runs.
START_SECONDS = 60.0
ACCEPT_SECONDS = 10.0
MAX_GREETING = 2**16


class ForkServer:
    """The process, which starts with the first connection and ends with this object. Thread-safe.

    module     its main function reads settings from stdin as JSON, then calls `serve_forks`
    patience   wall-clock seconds until a running process that accepts no connection is replaced
    """

    def __init__(
        self, module: str, settings: Mapping[str, Any], *, patience: float = ACCEPT_SECONDS
    ) -> None:
        self._module, self._settings, self._patience = module, settings, patience
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._started: subprocess.Popen[bytes] | None = None  # accepted a connection
        self._stop: Callable[[], object] = lambda: None  # ends the process; its forks go on

    def start(self) -> None:
        """Start the process if it does not run; does not wait until it is ready."""
        with self._lock:
            self._ensure_process()

    def connect(self) -> socket.socket:
        """A connection to a new fork; closing it ends the fork. Raises ValueError if the process
        cannot serve any, with its reason, and RuntimeError if it does not answer.
        """
        for _ in range(2):
            connection, process = self._connect()
            try:
                greeting = _read_line(connection)
            except (OSError, EOFError):
                connection.close()
                # Only the process: its forks belong to other connections.
                process.kill()
                process.wait()
                continue
            if (error := json.loads(greeting).get("error")) is not None:
                connection.close()
                raise ValueError(error)
            self._started = process
            connection.settimeout(None)
            return connection
        raise RuntimeError(f"{self._module} accepts no connection")

    def _connect(self) -> "tuple[socket.socket, subprocess.Popen[bytes]]":
        """A connection that its process may not have accepted yet."""
        parent_end, child_end = socket.socketpair()
        with child_end, self._lock:
            process, listener = self._ensure_process()
            parent_end.settimeout(self._patience if process is self._started else START_SECONDS)
            try:
                socket.send_fds(listener, [b"."], [child_end.fileno()])
            except OSError:  # a process that is stopped or has just ended
                process.kill()
        return parent_end, process

    def _ensure_process(self) -> "tuple[subprocess.Popen[bytes], socket.socket]":
        """The process and its socket; it is started if it does not run."""
        if self._socket is not None and self._process is not None and self._process.poll() is None:
            return self._process, self._socket
        self._stop()
        parent_end, child_end = socket.socketpair()
        parent_end.settimeout(self._patience)
        with tempfile.TemporaryFile() as file, child_end:
            file.write(json.dumps(self._settings).encode())
            file.seek(0)
            self._process = subprocess.Popen(
                [sys.executable, "-m", self._module, str(child_end.fileno())],
                stdin=file,
                stdout=subprocess.DEVNULL,
                pass_fds=[child_end.fileno()],
                process_group=0,  # not interrupted by the keyboard: it ends with its socket
            )
        self._socket = parent_end
        self._stop = weakref.finalize(self, _stop_process, parent_end, self._process)
        return self._process, parent_end


def _stop_process(connection: socket.socket, process: "subprocess.Popen[bytes]") -> None:
    connection.close()
    process.kill()
    process.wait()


def _read_line(connection: socket.socket) -> bytes:
    line = b""
    while line[-1:] != b"\n":
        piece = connection.recv(MAX_GREETING)
        if not piece:
            raise EOFError
        line += piece
    return line


def serve_forks(respond: Callable[[socket.socket], None], error: str | None = None) -> None:
    """Serve the socket of the ForkServer until its other end is closed.

    respond   runs in the fork of a connection; if a signal ends it, {"signal": number} is sent
    error     why no connection can be served; it is what clients get
    """
    greeting = json.dumps({} if error is None else {"error": error}).encode() + b"\n"
    listener = socket.socket(fileno=int(sys.argv[1]))
    os.nice(NICE)
    freeze_heap()  # forks would copy the memory of objects that their collector marks
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # reap the supervisors automatically
    while True:
        _, fds, _, _ = socket.recv_fds(listener, 1, 1)
        if not fds:
            return
        if os.fork() == 0:
            listener.close()
            try:
                _supervise(socket.socket(fileno=fds[0]), greeting, respond)
            finally:
                os._exit(0)
        os.close(fds[0])


def _supervise(
    connection: socket.socket, greeting: bytes, respond: Callable[[socket.socket], None]
) -> None:
    """Let a child answer the connection; end the child when the connection is closed."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    connection.sendall(greeting)
    child_ended, child_runs = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(child_ended)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # discard the messages of parsers
        respond(connection)
        os._exit(0)
    os.close(child_runs)
    poll = select.poll()
    # Without events: only the end of the other side is reported.
    poll.register(child_ended, 0)
    poll.register(connection, 0)
    if any(fd == connection.fileno() for fd, _ in poll.poll()):
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        message: JSONObject = {"signal": os.WTERMSIG(status)}
        connection.sendall(json.dumps(message).encode() + b"\n")


def lower_limit(which: int, most: int) -> None:
    """Set the soft limit of a resource, unless it is already lower."""
    soft, hard = resource.getrlimit(which)
    finite = [limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(which, (min([most, *finite]), hard))


@dataclass(frozen=True)
class MemoryUse:
    """Bytes of this process: its address space, and its resident memory that is not file-backed."""

    size: int
    own: int


def memory_use() -> MemoryUse:
    """Without /proc, the memory of a fork is not limited, and its size counts as 0."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            size, resident, shared = (
                int(number) * os.sysconf("SC_PAGESIZE") for number in file.read().split()[:3]
            )
    except FileNotFoundError:
        return MemoryUse(2**40, 0)
    return MemoryUse(size, resident - shared)
