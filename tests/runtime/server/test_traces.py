"""Spans of requests, as an OpenTelemetry collector receives them."""

import re
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("opentelemetry.sdk")
httpx = pytest.importorskip("httpx")
trace_service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
import gzip  # noqa: E402

from serving import serving  # noqa: E402

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SECONDS = 20


class Collector:
    """Spans that arrived at `url`, by the id of their request."""

    def __init__(self):
        self.spans = {}
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers["Content-Encoding"] == "gzip":
                    body = gzip.decompress(body)
                collector.add(trace_service.ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1/traces"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def add(self, request):
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                for span in scope.spans:
                    self.spans[attributes(span)["gen_ai.request.id"]] = span

    def span(self, name):
        until = time.monotonic() + SECONDS
        while name not in self.spans:
            assert time.monotonic() < until, f"no span of {name}, there are {list(self.spans)}"
            time.sleep(0.05)
        return self.spans[name]

    def close(self):
        self._server.shutdown()
        self._server.server_close()


def attributes(span):
    return {
        each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes
    }


def started(*flags):
    return serving("--options", "layout=paged", *flags)


def complete(http, name, headers=(), **more):
    body = {"model": "atomc-demo", "prompt": "And he said", "temperature": 0, "max_tokens": 4}
    return http.post(
        "/v1/completions", json=body | more, headers={"X-Request-Id": name, **dict(headers)}
    )


def test_a_request_is_a_span_below_the_clients():
    collector = Collector()
    with (
        started("--otlp-traces-endpoint", collector.url) as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
    ):
        before = time.time_ns()
        parent = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
        usage = complete(http, "whole", parent, n=2, seed=1).json()["usage"]
        complete(http, "streamed", stream=True)
        assert complete(http, "refused", max_tokens=-1).status_code == 400
        span, streamed = collector.span("whole"), collector.span("streamed")
        found = attributes(span)
        assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)
        assert found["gen_ai.usage.prompt_tokens"] == usage["prompt_tokens"]
        assert found["gen_ai.usage.completion_tokens"] == usage["completion_tokens"] == 8
        assert found["gen_ai.request.n"] == 2 and found["gen_ai.request.max_tokens"] == 4
        assert found["gen_ai.response.model"] == "atomc-demo"
        assert 0 <= found["gen_ai.latency.time_in_queue"] < found["gen_ai.latency.e2e"]
        assert 0 < found["gen_ai.latency.time_to_first_token"] <= found["gen_ai.latency.e2e"]
        seconds = (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9
        assert seconds == pytest.approx(found["gen_ai.latency.e2e"], abs=1e-3)
        assert before - 1e8 < span.start_time_unix_nano < time.time_ns()
        assert not streamed.parent_span_id and streamed.trace_id != span.trace_id
        assert "refused" not in collector.spans  # it was never a request of the engine
        # The last one goes out at the end at the latest.
        complete(http, "last")
    assert attributes(collector.span("last"))["gen_ai.usage.completion_tokens"] == 4
    collector.close()


@pytest.mark.slow
def test_a_collector_that_is_away_costs_no_request_and_no_long_shutdown():
    with (
        started("--otlp-traces-endpoint", "http://127.0.0.1:9/v1/traces") as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
    ):
        assert complete(http, "a").status_code == 200
        start = time.monotonic()
    assert time.monotonic() - start < 10
    assert server.process.returncode == 0 and re.search("request a: ", server.log)


def test_what_is_no_url_is_refused():
    from atomc.runtime.server.config import ServerConfig

    with pytest.raises(ValueError, match="expected a URL such as http://localhost:4318"):
        ServerConfig(otlp_traces_endpoint="localhost:4317")
