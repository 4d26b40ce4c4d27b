"""Whether a grammar can be compiled, found out by a process that it cannot hurt."""

import json
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from dataclasses import dataclass, fields

from atomc.runtime.sampling_params import Structured

WORKER = "atomc.runtime.grammar_worker"


@dataclass(frozen=True)
class Tried:
    """The grammar in llguidance's language, and the memory that it took to compile it."""

    text: str
    num_bytes: int


class GrammarTrial:
    """Runs grammars through a process, which starts with the first and ends with this object. Any thread may call it.

    seconds   processor time for each grammar
    memory    bytes for each grammar
    """

    def __init__(
        self, tokenizer: str, vocab_size: int, eos_ids: frozenset[int], *, seconds: float, memory: int
    ) -> None:
        self._given = {"tokenizer": tokenizer, "vocab_size": vocab_size, "eos_ids": sorted(eos_ids), "seconds": seconds,
                       "memory": memory}  # fmt: skip
        self._lock = threading.Lock()
        self._worker: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    def start(self) -> None:
        """Start the process, if it does not run, and return before it is ready."""
        with self._lock:
            self._started()

    def run(self, structured: Structured) -> Tried:
        """Raises ValueError, with what is wrong, for a grammar that does not compile within the limits."""
        given = {each.name: getattr(structured, each.name) for each in fields(structured)}
        asked = {name: value for name, value in given.items() if value is not None and value is not False}
        here, there = socket.socketpair()
        with here:
            with there, self._lock:
                socket.send_fds(self._started(), [b"."], [there.fileno()])
            here.sendall(json.dumps(asked).encode())
            here.shutdown(socket.SHUT_WR)
            with here.makefile("rb") as file:
                answer = file.read()
        if not answer:
            raise RuntimeError("the process that compiles grammars on trial ended without an answer")
        found = json.loads(answer)
        if (error := found.get("error")) is not None:
            raise ValueError(error)
        return Tried(found["text"], found["num_bytes"])

    def _started(self) -> socket.socket:
        """The way to the process."""
        if self._socket is not None and self._worker is not None and self._worker.poll() is None:
            return self._socket
        here, there = socket.socketpair()
        with tempfile.TemporaryFile() as file, there:
            file.write(json.dumps(self._given).encode())
            file.seek(0)
            command = [sys.executable, "-m", WORKER, str(there.fileno())]
            self._worker = subprocess.Popen(command, stdin=file, stdout=subprocess.DEVNULL, pass_fds=[there.fileno()])
        self._socket = here
        weakref.finalize(self, _end, here, self._worker)
        return here


def _end(connection: socket.socket, worker: "subprocess.Popen[bytes]") -> None:
    connection.close()
    worker.kill()
    worker.wait()
