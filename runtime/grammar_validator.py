"""Validates grammars in a separate process, which an expensive or crashing grammar cannot harm."""

import json
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from dataclasses import dataclass, fields

from atomc.runtime.sampling.sampling_params import Structured

WORKER = "atomc.runtime.grammar_worker"


@dataclass(frozen=True)
class ValidatedGrammar:
    """The grammar in llguidance's language, and the memory used to compile it."""

    text: str
    num_bytes: int


class GrammarValidator:
    """Compiles grammars in a worker process, which starts with the first grammar and ends with this
    object. Thread-safe.

    seconds   CPU time limit per grammar
    memory    memory limit per grammar in bytes
    """

    def __init__(
        self,
        tokenizer: str,
        vocab_size: int,
        eos_ids: frozenset[int],
        *,
        seconds: float,
        memory: int,
    ) -> None:
        self._settings = {
            "tokenizer": tokenizer,
            "vocab_size": vocab_size,
            "eos_ids": sorted(eos_ids),
            "seconds": seconds,
            "memory": memory,
        }
        self._lock = threading.Lock()
        self._worker: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    def start(self) -> None:
        """Start the process if it does not run; does not wait until it is ready."""
        with self._lock:
            self._ensure_process()

    def run(self, structured: Structured) -> ValidatedGrammar:
        """Raises ValueError with the reason for a grammar that does not compile within the
        limits.
        """
        values = {each.name: getattr(structured, each.name) for each in fields(structured)}
        fields_given = {
            name: value
            for name, value in values.items()
            if value is not None and value is not False
        }
        parent_end, child_end = socket.socketpair()
        with parent_end:
            with child_end, self._lock:
                socket.send_fds(self._ensure_process(), [b"."], [child_end.fileno()])
            parent_end.sendall(json.dumps(fields_given).encode())
            parent_end.shutdown(socket.SHUT_WR)
            with parent_end.makefile("rb") as file:
                answer = file.read()
        if not answer:
            raise RuntimeError("the grammar validation process ended without a response")
        found = json.loads(answer)
        if (error := found.get("error")) is not None:
            raise ValueError(error)
        return ValidatedGrammar(found["text"], found["num_bytes"])

    def _ensure_process(self) -> socket.socket:
        """The socket of the process, which is started if it does not run."""
        if self._socket is not None and self._worker is not None and self._worker.poll() is None:
            return self._socket
        parent_end, child_end = socket.socketpair()
        with tempfile.TemporaryFile() as file, child_end:
            file.write(json.dumps(self._settings).encode())
            file.seek(0)
            command = [sys.executable, "-m", WORKER, str(child_end.fileno())]
            self._worker = subprocess.Popen(
                command, stdin=file, stdout=subprocess.DEVNULL, pass_fds=[child_end.fileno()]
            )
        self._socket = parent_end
        weakref.finalize(self, _stop_process, parent_end, self._worker)
        return parent_end


def _stop_process(connection: socket.socket, worker: "subprocess.Popen[bytes]") -> None:
    connection.close()
    worker.kill()
    worker.wait()
