"""Grammars, and the model without its head for embeddings: compiled for requests while the engine's loop goes on."""

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

from atomc.runtime.fence import RequestError, RequestFailed
from atomc.runtime.sampling_params import Structured
from atomc.runtime.server.messages import Submit

if TYPE_CHECKING:
    from atomc.runtime.engine import Engine
    from atomc.runtime.structured import Grammars

log = logging.getLogger("atomc.engine")
# At once: one that takes long does not hold up the others.
NUM_THREADS = 4
MAX_PENDING = 64
# The loop goes first.
NICE = 10
SWITCH_SECONDS = 0.0002  # Python's own interval is 0.005
CompileKey = Structured | Literal["hidden states"]


class CompileUnavailable(Exception):
    """A grammar cannot be compiled now. Try again after retry_after seconds."""

    retry_after = 5.0


@dataclass
class PendingCompile:
    """Something that is being compiled, and the requests that wait for it."""

    compiled: "Future[None]"
    submits: dict[str, Submit] = field(default_factory=dict)


class CompileQueue:
    """Requests that wait for something to be compiled; its length is how many there are.

    The tokenizer is prepared when this is made: with a large vocabulary it takes seconds, in which all else would wait.
    """

    def __init__(self, engine: "Engine") -> None:
        self._engine = engine
        self._grammars: Grammars | None = None
        with suppress(ImportError, ValueError):  # a request that needs them is refused with the reason
            self._grammars = engine.forms.grammars()
        self._queue: SimpleQueue[tuple[CompileKey, Future[None]]] = SimpleQueue()
        self._pending: dict[CompileKey, PendingCompile] = {}
        for number in range(NUM_THREADS):
            # The end of the process does not wait for them.
            threading.Thread(target=self._run, name=f"compiling {number}", daemon=True).start()

    def __len__(self) -> int:
        return sum(len(pending.submits) for pending in self._pending.values())

    def enqueue(self, submit: Submit) -> bool:
        """Whether the request has to wait."""
        key: CompileKey | None = "hidden states" if submit.pooling is not None else submit.params.structured
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
        """Requests that need not wait any more, or why what they need could not be compiled: ValueError, RequestFailed or
        CompileUnavailable. Those that are not taken come again."""
        for key, pending in list(self._pending.items()):
            if not pending.compiled.done():
                continue
            error = pending.compiled.exception()
            assert error is None or isinstance(error, Exception)
            while pending.submits:
                yield pending.submits.pop(next(iter(pending.submits))), error
            del self._pending[key]

    def drop(self, ids: Iterable[str]) -> None:
        """Their clients are gone."""
        for request_id in ids:
            for pending in self._pending.values():
                pending.submits.pop(request_id, None)

    def _is_ready(self, key: CompileKey) -> bool:
        if isinstance(key, str):
            return self._engine.pools
        return self._grammars is None or self._grammars.known(key)

    def _submit(self, key: CompileKey) -> "Future[None]":
        future: Future[None] = Future()
        grammars = self._grammars
        if isinstance(key, Structured) and grammars is not None and grammars.num_bytes > grammars.cache_bytes:
            future.set_exception(CompileUnavailable("compiled grammars of running requests use all of grammar_cache_bytes="
                                                    f"{grammars.cache_bytes}: try again later"))  # fmt: skip
        elif len(self._pending) >= MAX_PENDING:
            future.set_exception(CompileUnavailable(f"{MAX_PENDING} grammars are waiting to be compiled: try again later"))
        else:
            self._queue.put((key, future))
        return future

    def _run(self) -> None:
        """The life of a thread."""
        if sys.platform == "linux":  # where a thread has a priority of its own
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
        assert self._grammars is not None
        try:
            self._grammars.compile(key)
        except ValueError:
            raise
        except BaseException as error:  # the trial has passed: it is the machine that fails, or a panic of the library
            log.exception("a form of output could not be compiled")
            raise CompileUnavailable("the form of output could not be compiled: try again later") from error

    def _compile_headless(self) -> None:
        interval = sys.getswitchinterval()
        # Compiling is Python for seconds, and the loop waits for the interpreter many times a step.
        sys.setswitchinterval(SWITCH_SECONDS)
        try:
            self._engine.prepare_pooling()
        except ValueError:
            raise
        except Exception as error:  # it fails the requests that wait for it; steps go on with the program that is there
            log.exception("the model could not be compiled without its head")
            what = f"the engine failed while compiling the model for embeddings: {type(error).__name__}"
            raise RequestFailed(RequestError(f"{what}; its log says more")) from error
        finally:
            sys.setswitchinterval(interval)
