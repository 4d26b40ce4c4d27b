"""Outputs of a step on their way from the engine's process to the streams of the frontend."""

import asyncio
from contextlib import suppress
from typing import Any

import pytest

for package in ("msgspec", "zmq"):
    pytest.importorskip(package)

import msgspec  # noqa: E402

from atomc.runtime.requests.request import Output, TokenLogprobs  # noqa: E402
from atomc.runtime.server.engines import ipc  # noqa: E402
from atomc.runtime.server.engines.client import EngineClient  # noqa: E402
from atomc.runtime.server.engines.engine_process import EngineLoop  # noqa: E402
from atomc.runtime.server.engines.ipc import Progress  # noqa: E402
from atomc.runtime.server.engines.request_stream import RequestStream  # noqa: E402

SCORES = (TokenLogprobs(1, -0.5, 1, ()),)


def sent(unanswered: set[str], *outputs: Output) -> Progress:
    """The message with these outputs, as the frontend decodes it."""
    loop: Any = object.__new__(EngineLoop)
    loop._progress, loop._unanswered = Progress(), unanswered
    loop._add_outputs(outputs)
    encoded = msgspec.msgpack.encode(loop._progress)
    progress: Progress = msgspec.msgpack.decode(encoded, type=ipc.EngineEvent)
    return progress


def read(progress: Progress, *ids: str) -> list[Output]:
    """What the reader of a stream of these requests gets, if it was slow."""

    async def run() -> list[Output]:
        client: Any = object.__new__(EngineClient)
        stream = RequestStream(ids, list)
        client._streams = dict.fromkeys(ids, stream)
        client._handle(progress)
        stream.fail(RuntimeError("no more"))
        outputs = []
        with suppress(RuntimeError):  # all requests may have finished
            async for output in stream:
                outputs.append(output)
        return outputs

    return asyncio.run(run())


def test_a_token_alone_is_an_id_and_a_number() -> None:
    outputs = [Output("1/0", (5,), num_cached=3), Output("2/0", (6,))]
    progress = sent(set(), *outputs)
    assert (progress.ids, progress.tokens, progress.outputs) == (["1/0", "2/0"], [5, 6], [])
    assert read(progress, "1/0", "2/0") == [Output("1/0", (5,)), Output("2/0", (6,))]


def test_all_else_is_sent_as_it_is() -> None:
    outputs = [
        Output("1/0", (5, 6)),
        Output("2/0", (5,), finish_reason="stop", stop_reason=5),
        Output("3/0", (1,), logprobs=SCORES),
        Output("4/0", (), finish_reason="abort"),
    ]
    progress = sent(set(), *outputs)
    assert progress.ids == [] and progress.outputs == outputs
    # A stream that fails yields what came before.
    assert read(progress, "1/0", "2/0", "3/0", "4/0") == outputs


def test_the_first_output_of_a_request_says_what_was_cached() -> None:
    unanswered = {"1/0", "2/0"}
    first = Output("1/0", (5,), num_cached=3, queue_seconds=0.5)
    progress = sent(unanswered, first)
    assert progress.outputs == [first] and progress.outputs[0].queue_seconds == 0.5
    assert unanswered == {"2/0"}
    assert sent(unanswered, Output("1/0", (6,), num_cached=3)).ids == ["1/0"]


def test_tokens_of_one_message_keep_their_order() -> None:
    first = [Output("1/0", (5,), num_cached=3), Output("1/0", (6,)), Output("1/0", (7,))]
    assert read(sent({"1/0"}, *first), "1/0") == [Output("1/0", (5, 6, 7), num_cached=3)]
    last = [Output("1/0", (5,)), Output("1/0", (6,), finish_reason="length")]
    (output,) = read(sent(set(), *last), "1/0")
    assert (output.token_ids, output.finish_reason) == ((5, 6), "length")
