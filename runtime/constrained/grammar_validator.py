"""Validates grammars in a separate process, which an expensive or crashing grammar cannot harm."""

import json
import signal
import socket
from dataclasses import dataclass

from atomc.runtime.processes.fork_server import ACCEPT_SECONDS, ForkServer
from atomc.runtime.requests.sampling_params import Structured

WORKER = "atomc.runtime.constrained.grammar_worker"
# Wall-clock limit per grammar, as a multiple of its CPU time: forks have a low priority.
WALL_PER_CPU = 12
# Why a signal ended the validation.
SIGNAL_MESSAGES: dict[int, str] = {
    signal.SIGPROF: "it takes more than {seconds:g} s to compile",
    signal.SIGABRT: "it needs more than {megabytes} MiB of memory to compile",
    signal.SIGSEGV: "it is nested too deep",
    signal.SIGBUS: "it is nested too deep",
}


@dataclass(frozen=True)
class ValidatedGrammar:
    """The grammar in llguidance's language, and the memory used to compile it."""

    text: str
    num_bytes: int


class GrammarValidator:
    """Compiles grammars in a worker process, which starts with the first grammar and ends with this
    object. Thread-safe.

    seconds    CPU time limit per grammar
    memory     memory limit per grammar in bytes
    patience   as in ForkServer
    """

    def __init__(
        self,
        tokenizer: str,
        vocab_size: int,
        eos_ids: frozenset[int],
        *,
        seconds: float,
        memory: int,
        patience: float = ACCEPT_SECONDS,
    ) -> None:
        settings = {
            "tokenizer": tokenizer,
            "vocab_size": vocab_size,
            "eos_ids": sorted(eos_ids),
            "seconds": seconds,
            "memory": memory,
        }
        self._seconds, self._memory = seconds, memory
        self._server = ForkServer(WORKER, settings, patience=patience)

    def start(self) -> None:
        """Start the process if it does not run; does not wait until it is ready."""
        self._server.start()

    def run(self, structured: Structured) -> ValidatedGrammar:
        """Raises ValueError with the reason for a grammar that does not compile within the limits,
        and RuntimeError if the process does not answer.
        """
        values = vars(structured).items()
        constraint = {name: value for name, value in values if value not in (None, False)}
        answer = self._answer(json.dumps(constraint).encode())
        if not answer:
            raise RuntimeError("the grammar validation process ended without a response")
        message = json.loads(answer)
        if (number := message.get("signal")) is not None:
            why = SIGNAL_MESSAGES.get(number, f"the compiler was ended by signal {number}")
            why = why.format(seconds=self._seconds, megabytes=self._memory >> 20)
            raise ValueError(f"{next(iter(constraint))}: {why}")
        if (error := message.get("error")) is not None:
            raise ValueError(error)
        return ValidatedGrammar(message["text"], message["num_bytes"])

    def _answer(self, request: bytes) -> bytes:
        limit = WALL_PER_CPU * self._seconds
        with self._server.connect() as connection:
            connection.settimeout(limit)
            try:
                connection.sendall(request)
                connection.shutdown(socket.SHUT_WR)
                with connection.makefile("rb") as file:
                    return file.read()
            except TimeoutError as error:
                raise RuntimeError(f"the grammar was not validated within {limit:g} s") from error
