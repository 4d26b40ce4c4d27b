"""Grammars of requests, compiled while the engine's loop goes on."""

import logging
import os
import sys
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import TYPE_CHECKING

from atomc.runtime.sampling_params import Structured
from atomc.runtime.server.messages import Submit

if TYPE_CHECKING:
    from atomc.runtime.engine import Engine
    from atomc.runtime.structured import Grammar, Grammars

log = logging.getLogger("atomc.engine")
# At once: one that takes long does not hold up the others.
THREADS = 4
MOST_WAITING = 64
# The loop goes first.
NICE = 10


class GrammarsBusy(Exception):
    """A grammar cannot be compiled now. Try again after retry_after seconds."""

    retry_after = 5.0


@dataclass
class Form:
    """One form of output, and the requests that wait for it."""

    compiled: "Future[Grammar]"
    submits: dict[str, Submit] = field(default_factory=dict)


class Compiling:
    """Requests whose grammars are being compiled; its length is how many there are.

    The tokenizer is prepared when this is made: with a large vocabulary it takes seconds, in which all else would wait.
    """

    def __init__(self, engine: "Engine") -> None:
        self._grammars: Grammars | None = None
        with suppress(ImportError, ValueError):  # a request that needs them is refused with the reason
            self._grammars = engine.drawing.grammars()
        self._queue: SimpleQueue[tuple[Structured, Future[Grammar]]] = SimpleQueue()
        self._forms: dict[Structured, Form] = {}
        for number in range(THREADS if self._grammars is not None else 0):
            # The end of the process does not wait for them.
            threading.Thread(target=self._compile, name=f"grammar {number}", daemon=True).start()

    def __len__(self) -> int:
        return sum(len(form.submits) for form in self._forms.values())

    def start(self, submit: Submit) -> bool:
        """Whether the request has to wait for its grammar."""
        structured = submit.params.structured
        if structured is None or self._grammars is None:
            return False
        form = self._forms.get(structured)
        if form is None and self._grammars.known(structured):
            return False
        if form is None:
            form = self._forms[structured] = Form(self._future(structured, self._grammars))
        form.submits[submit.id] = submit
        return True

    def finished(self) -> Iterator[tuple[Submit, Exception | None]]:
        """Requests whose grammar is compiled, or why it is not: ValueError or GrammarsBusy. Those that are not taken come
        again."""
        for structured, form in list(self._forms.items()):
            if not form.compiled.done():
                continue
            error = form.compiled.exception()
            assert error is None or isinstance(error, Exception)
            while form.submits:
                yield form.submits.pop(next(iter(form.submits))), error
            del self._forms[structured]

    def drop(self, ids: Iterable[str]) -> None:
        """Their clients are gone."""
        for request_id in ids:
            for form in self._forms.values():
                form.submits.pop(request_id, None)

    def _future(self, structured: Structured, grammars: "Grammars") -> "Future[Grammar]":
        future: Future[Grammar] = Future()
        if grammars.num_bytes > grammars.cache_bytes:
            future.set_exception(GrammarsBusy("forms of output of running requests take all the memory that they may, "
                                              f"{grammars.cache_bytes} bytes: try again later"))  # fmt: skip
        elif len(self._forms) >= MOST_WAITING:
            future.set_exception(GrammarsBusy(f"{MOST_WAITING} forms of output wait to be compiled: try again later"))
        else:
            self._queue.put((structured, future))
        return future

    def _compile(self) -> None:
        """The life of a thread."""
        assert self._grammars is not None
        if sys.platform == "linux":  # where a thread has a priority of its own
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        while True:
            structured, future = self._queue.get()
            try:
                future.set_result(self._grammars.compile(structured))
            except ValueError as error:
                future.set_exception(error)
            except BaseException:  # the trial has passed: it is the machine that fails, or a panic of the library
                log.exception("a form of output could not be compiled")
                future.set_exception(GrammarsBusy("the form of output could not be compiled: try again later"))
