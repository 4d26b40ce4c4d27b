"""The queue of compiles of a server's engine, without an engine."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("msgspec")

from atomc.runtime.requests.sampling_params import SamplingParams
from atomc.runtime.server.engines.compile_queue import CompileQueue
from atomc.runtime.server.engines.ipc import Submit


def no_compiler() -> None:
    raise ValueError("there is no tokenizer")


def test_it_is_busy_until_a_compile_ends_whose_request_was_aborted() -> None:
    may_end, ended = threading.Event(), threading.Event()
    engine: Any = SimpleNamespace(
        structured_outputs=SimpleNamespace(compiler=no_compiler),
        executor=SimpleNamespace(can_pool=False),
        prepare_pooling=lambda: may_end.wait(10),
    )
    queue = CompileQueue(engine)
    assert queue.enqueue(Submit("a", [1], SamplingParams(), pooling="mean"))
    (pending,) = queue._pending.values()
    pending.compiled.add_done_callback(lambda _: ended.set())
    queue.drop(["a"])
    assert queue.is_busy and not len(queue)
    may_end.set()
    assert ended.wait(10) and not queue.is_busy
    assert not list(queue.completed())
