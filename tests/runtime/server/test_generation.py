"""A generation of the server, over a stream of outputs, without engine and model."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

for package in ("fastapi", "prometheus_client", "zmq"):
    pytest.importorskip(package)

from starlette.requests import Request  # noqa: E402

from atomc.runtime.requests.request import Output  # noqa: E402
from atomc.runtime.requests.request_errors import RequestError  # noqa: E402
from atomc.runtime.requests.sampling_params import SamplingParams  # noqa: E402
from atomc.runtime.server.config import ServerConfig  # noqa: E402
from atomc.runtime.server.engines.request_stream import RequestStream  # noqa: E402
from atomc.runtime.server.http.responses import APIError  # noqa: E402
from atomc.runtime.server.metrics import Metrics  # noqa: E402
from atomc.runtime.server.service.generation import Generation, RequestSummary  # noqa: E402
from atomc.runtime.server.service.image_budget import ImageBudget  # noqa: E402
from atomc.runtime.server.service.protocol import CompletionRequest  # noqa: E402
from atomc.runtime.server.service.service import Service  # noqa: E402


class Engines:
    """In place of the engines: requests get these outputs."""

    clients = ()

    def __init__(self, outputs: list[Output]) -> None:
        self.outputs = outputs

    def next_id(self) -> str:
        return "7"

    def submit(self, requests: Any) -> RequestStream:
        stream = RequestStream([request.id for request in requests], list)
        for request in requests:
            stream.accept(request.id)
        for output in self.outputs:
            stream.put(output)
        return stream


def summary_of(*outputs: Output) -> tuple[RequestSummary, Metrics]:
    """What is known of a request that gets these outputs and fails."""
    engines: Any = Engines([*outputs])
    metrics, found = Metrics(engines, "model"), []

    async def receive() -> Any:
        await asyncio.Event().wait()

    async def run() -> None:
        model: Any = SimpleNamespace(
            tokenizer=None,
            names=("model",),
            check_name=lambda name: None,
            adapter=lambda name: None,
        )
        service = Service(engines, model, ServerConfig(), metrics, 1, ImageBudget(1))
        traces: Any = SimpleNamespace(record=lambda summary, *_: found.append(summary))
        service.traces = traces
        request = Request({"type": "http", "headers": [], "state": {"request_id": "a"}}, receive)
        body = CompletionRequest(prompt="")
        generation = Generation(service, request, body, [[1, 2]], SamplingParams())
        await generation.start()
        with pytest.raises(APIError), generation:
            async for _ in generation:
                pass

    asyncio.run(run())
    return found[0], metrics


@pytest.mark.parametrize("by_client", [False, True])
def test_a_request_that_fails_has_no_time_to_the_first_token(by_client: bool) -> None:
    failed = Output("7/0", (), finish_reason="error", error=RequestError("no", by_client))
    summary, metrics = summary_of(failed)
    assert summary.ttft_seconds is None and summary.num_new == 0 and summary.error is not None
    assert not metrics.recent_ttft


def test_a_request_that_the_engine_aborts_is_an_error() -> None:
    summary, _ = summary_of(Output("7/0", (), finish_reason="abort"))
    assert summary.ttft_seconds is None and summary.error == "error"
