"""OpenTelemetry traces of requests: a span each, with the attributes that vLLM's spans have.

A span is a child of the client's, which the header `traceparent` names (W3C Trace Context). Names
of attributes: the semantic conventions of generative AI, and vLLM's where these have none.
"""

import os
import time
from collections.abc import Mapping

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from atomc.runtime.server.service.generation import RequestSummary


class Traces:
    """Sends the spans of ended requests to a collector, in a thread of its own; a collector that
    does not answer costs spans, not requests.

    endpoint  the URL of an OTLP collector over HTTP, such as http://localhost:4318/v1/traces
    """

    def __init__(self, endpoint: str) -> None:
        name = os.environ.get("OTEL_SERVICE_NAME", "atomc")
        resource = Resource.create({"service.name": name})
        # Not registered as the provider of this process: only this object makes spans.
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        self._tracer = self._provider.get_tracer("atomc")
        self._propagator = TraceContextTextMapPropagator()

    def record(self, request: RequestSummary, headers: Mapping[str, str], model: str) -> None:
        """Make the span of a request that ended now. headers: of the HTTP request, lower case."""
        end = time.time_ns()
        span = self._tracer.start_span(
            "llm_request",
            context=self._propagator.extract(dict(headers)),
            kind=SpanKind.SERVER,
            start_time=end - round(request.seconds * 1e9),
        )
        params = request.params
        span.set_attributes(
            {
                "gen_ai.request.id": request.request_id,
                "gen_ai.response.model": model,
                "gen_ai.request.temperature": params.temperature,
                "gen_ai.request.top_p": params.top_p,
                "gen_ai.request.n": request.num_choices,
                "gen_ai.usage.num_sequences": request.num_choices,
                "gen_ai.usage.prompt_tokens": request.num_prompt,
                "gen_ai.usage.cached_tokens": request.num_cached,
                "gen_ai.usage.completion_tokens": request.num_new,
                "gen_ai.latency.e2e": request.seconds,
                "gen_ai.response.finish_reasons": request.finish_reasons,
            }
        )
        if params.max_tokens is not None:
            span.set_attribute("gen_ai.request.max_tokens", params.max_tokens)
        if request.ttft_seconds is not None:
            span.set_attribute("gen_ai.latency.time_to_first_token", request.ttft_seconds)
            span.set_attribute("gen_ai.latency.time_in_queue", request.queue_seconds)
        if request.error is not None:
            span.set_status(Status(StatusCode.ERROR, request.error))
        span.end(end)

    def close(self) -> None:
        """Send what is left."""
        self._provider.shutdown()
