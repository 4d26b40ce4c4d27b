"""Compiles grammars, and the headless model for embeddings, in threads of the engine process."""

import logging
import os
import sys
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import TYPE_CHECKING, Literal

from atomc.runtime.requests.request_errors import RequestError, RequestFailed
from atomc.runtime.requests.sampling_params import Structured
from atomc.runtime.server.engines.ipc import Submit

if TYPE_CHECKING:
    from atomc.runtime.constrained.grammar_compiler import GrammarCompiler
    from atomc.runtime.engine import Engine

log = logging.getLogger("atomc.engine")
# Several, so that a slow compile does not delay the others.
NUM_THREADS = 4
MAX_PENDING = 64
# Lower the priority, so that the engine loop runs first.
NICE = 10
SWITCH_SECONDS = 0.0002  # Python's default is 0.005
CompileKey = Structured | Literal["hidden states"]


class CompileUnavailable(Exception):
    """A grammar cannot be compiled now. Retry after `retry_after` seconds."""

    retry_after = 5.0


@dataclass
class PendingCompile:
    """A compile in progress, and the requests that wait for it."""

    compiled: "Future[None]"
    submits: dict[str, Submit] = field(default_factory=dict)


class CompileQueue:
    """Requests that wait for a compile; `len` is their number.

    Prepares the tokenizer for grammars on construction: for a large vocabulary this takes seconds,
    which would delay the first requests.
    """

    def __init__(self, engine: "Engine") -> None:
        self._engine = engine
        self._compiler: GrammarCompiler | None = None
        with suppress(
            ImportError, ValueError
        ):  # requests that need grammars are rejected with the reason
            self._compiler = engine.structured_outputs.compiler()
        self._queue: SimpleQueue[tuple[CompileKey, Future[None]]] = SimpleQueue()
        self._pending: dict[CompileKey, PendingCompile] = {}
        for number in range(NUM_THREADS):
            # Daemon threads, so that the process does not wait for them at exit.
            threading.Thread(target=self._run, name=f"compiling {number}", daemon=True).start()

    def __len__(self) -> int:
        return sum(len(pending.submits) for pending in self._pending.values())

    @property
    def is_busy(self) -> bool:
        """Whether something is being compiled, perhaps for requests that were aborted, or requests
        wait to be added.
        """
        return any(
            pending.submits or not pending.compiled.done() for pending in self._pending.values()
        )

    def enqueue(self, submit: Submit) -> bool:
        """Queue the request's compile; returns False if it needs none, or if it is done."""
        key: CompileKey | None = (
            "hidden states" if submit.pooling is not None else submit.params.structured
        )
        if key is None:
            return False
        pending = self._pending.get(key)
        if pending is None and self._is_ready(key):
            return False
        if pending is None:
            pending = self._pending[key] = PendingCompile(self._submit(key))
        pending.submits[submit.id] = submit
        return True

    def completed(self) -> Iterator[tuple[Submit, Exception | None]]:
        """Requests whose compile has ended, with its error (ValueError, RequestFailed or
        CompileUnavailable) or None.

        Requests that the caller does not consume are yielded again by the next call.
        """
        for key, pending in list(self._pending.items()):
            if not pending.compiled.done():
                continue
            error = pending.compiled.exception()
            assert error is None or isinstance(error, Exception)
            while pending.submits:
                yield pending.submits.pop(next(iter(pending.submits))), error
            del self._pending[key]

    def drop(self, ids: Iterable[str]) -> None:
        """Remove aborted requests."""
        for request_id in ids:
            for pending in self._pending.values():
                pending.submits.pop(request_id, None)

    def _is_ready(self, key: CompileKey) -> bool:
        if isinstance(key, str):
            return self._engine.executor.can_pool
        return self._compiler is None or self._compiler.is_cached(key)

    def _submit(self, key: CompileKey) -> "Future[None]":
        future: Future[None] = Future()
        compiler = self._compiler
        if (
            isinstance(key, Structured)
            and compiler is not None
            and compiler.num_bytes > compiler.cache_bytes
        ):
            future.set_exception(
                CompileUnavailable(
                    "compiled grammars of running requests use all of grammar_cache_bytes="
                    f"{compiler.cache_bytes}: try again later"
                )
            )
        elif len(self._pending) >= MAX_PENDING:
            future.set_exception(
                CompileUnavailable(
                    f"{MAX_PENDING} grammars are waiting to be compiled: try again later"
                )
            )
        else:
            self._queue.put((key, future))
        return future

    def _run(self) -> None:
        """The main loop of a thread."""
        if sys.platform == "linux":  # only there, threads have their own priority
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        while True:
            key, future = self._queue.get()
            try:
                self._compile(key)
            except (ValueError, RequestFailed, CompileUnavailable) as error:
                future.set_exception(error)
            else:
                future.set_result(None)

    def _compile(self, key: CompileKey) -> None:
        if isinstance(key, str):
            self._compile_headless()
            return
        assert self._compiler is not None
        try:
            self._compiler.compile(key)
        except ValueError:
            raise
        # The grammar was validated: the machine failed, or the library panicked.
        except BaseException as error:  # a panic in Rust is no Exception
            log.exception("a grammar could not be compiled")
            raise CompileUnavailable(
                "the grammar could not be compiled: try again later"
            ) from error

    def _compile_headless(self) -> None:
        interval = sys.getswitchinterval()
        # Compiling holds the GIL for seconds, and the engine loop needs it many times per step.
        sys.setswitchinterval(SWITCH_SECONDS)
        try:
            self._engine.prepare_pooling()
        except ValueError:
            raise
        except Exception as error:  # fails only requests that wait; the compiled program goes on
            log.exception("the headless model could not be compiled")
            what = (
                "the engine failed while compiling the model for embeddings: "
                f"{type(error).__name__}"
            )
            raise RequestFailed(RequestError(f"{what}; see the server's log")) from error
        finally:
            sys.setswitchinterval(interval)
