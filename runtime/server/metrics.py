"""Prometheus metrics, with the prefix atomc; those that vLLM has too also with its prefix, so that
dashboards for vLLM work.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from atomc.runtime.server.engines.client import EngineClient
from atomc.runtime.server.engines.engine_group import Engines

Family = CounterMetricFamily | GaugeMetricFamily
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
TTFT_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40,
    80, 160,
)  # fmt: skip
TPOT_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5,
)  # fmt: skip
LATENCY_BUCKETS = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480)
TOKEN_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
# Histograms of requests: what they measure, and their buckets.
HISTOGRAMS: dict[str, tuple[str, Sequence[float]]] = {
    "time_to_first_token_seconds": ("Time to the first token.", TTFT_BUCKETS),
    "request_time_per_output_token_seconds": (
        "Mean time per token after the first.",
        TPOT_BUCKETS,
    ),
    "inter_token_latency_seconds": (
        "Time between two outputs of a choice, each of one token or of an accepted draft.",
        TPOT_BUCKETS,
    ),
    "request_queue_time_seconds": (
        "Time in the engine's queue before the first step.",
        TTFT_BUCKETS,
    ),
    "request_prefill_time_seconds": (
        "Time from the first step to the first token.",
        LATENCY_BUCKETS,
    ),
    "request_decode_time_seconds": ("Time from the first token to the last.", LATENCY_BUCKETS),
    "e2e_request_latency_seconds": ("Time to the last token.", LATENCY_BUCKETS),
    "request_prompt_tokens": ("Tokens per prompt.", TOKEN_BUCKETS),
    "request_generation_tokens": ("Generated tokens per choice.", TOKEN_BUCKETS),
}
# Metrics that vLLM 0.28 has under these names and with these meanings, behind "vllm:".
VLLM_NAMES = frozenset(
    (
        *HISTOGRAMS,
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
        "prefix_cache_queries",
        "prefix_cache_hits",
        "num_preemptions",
        "prompt_tokens",
        "generation_tokens",
        "request_success",
        "spec_decode_num_drafts",
        "spec_decode_num_draft_tokens",
        "spec_decode_num_accepted_tokens",
    )
)
# Names of older dashboards for vLLM.
OLDER_NAMES = {"inter_token_latency_seconds": ("time_per_output_token_seconds",)}
# Requests whose time to the first token is kept for the status page.
NUM_RECENT = 256


class Metrics:
    """Counters and histograms of requests, and the engines' stats."""

    def __init__(self, engines: Engines, model: str) -> None:
        self.registry = CollectorRegistry()
        self._histograms = {
            name: Histogram(
                f"atomc:{name}", text, ["model_name"], buckets=buckets, registry=self.registry
            ).labels(model)
            for name, (text, buckets) in HISTOGRAMS.items()
        }
        self.finished = Counter(
            "atomc:request_success",
            "Finished choices by finish reason.",
            ["model_name", "finished_reason"],
            registry=self.registry,
        )
        self.refused = Counter(
            "atomc:request_refused",
            "Requests answered with an error, by HTTP status.",
            ["model_name", "status"],
            registry=self.registry,
        )
        self.model = model
        self.recent_ttft: deque[float] = deque(maxlen=NUM_RECENT)
        self.registry.register(EngineCollector(engines, model))
        self._exposed = CollectorRegistry()
        self._exposed.register(AliasCollector(self.registry))

    def observe(self, name: str, value: float) -> None:
        """Add a value to one of HISTOGRAMS."""
        self._histograms[name].observe(value)

    def observe_ttft(self, seconds: float) -> None:
        self.observe("time_to_first_token_seconds", seconds)
        self.recent_ttft.append(seconds)

    def errors(self) -> dict[str, int]:
        """Number of error responses by HTTP status."""
        return {
            sample.labels["status"]: int(sample.value)
            for metric in self.refused.collect()
            for sample in metric.samples
            if sample.name.endswith("_total")
        }

    def text(self) -> bytes:
        return generate_latest(self._exposed)


@dataclass(eq=False)
class AliasCollector:
    """The metrics of a registry, and after each one that vLLM has, copies under vLLM's names."""

    registry: CollectorRegistry

    def collect(self) -> Iterator[Metric]:
        for metric in self.registry.collect():
            yield metric
            _, _, name = metric.name.partition(":")
            aliases = [name] if name in VLLM_NAMES else []
            for alias in [*aliases, *OLDER_NAMES.get(name, ())]:
                copy = Metric(f"vllm:{alias}", metric.documentation, metric.type)
                copy.samples = [
                    sample._replace(name=sample.name.replace(metric.name, copy.name, 1))
                    for sample in metric.samples
                ]
                yield copy


@dataclass(eq=False)
class EngineCollector:
    """Prometheus collector of the engines' last stats, with the number of each engine."""

    engines: Engines
    model: str

    def collect(self) -> Iterable[Metric]:
        families: dict[str, Family] = {}
        for number, client in enumerate(self.engines.clients):
            labels = {"engine": str(number), "model_name": self.model}
            for sample in samples(client):
                if sample.name not in families:
                    families[sample.name] = sample.family(
                        f"atomc:{sample.name}", sample.text, labels=[*labels, *sample.labels]
                    )
                families[sample.name].add_metric(
                    [*labels.values(), *sample.labels.values()], sample.value
                )
        return families.values()


@dataclass(frozen=True)
class MetricSample:
    """A number of one engine, with labels besides the engine's."""

    family: type[Family]
    name: str
    text: str
    value: float
    labels: Mapping[str, str] = field(default_factory=dict)


# Counters of an engine: the name, what it counts, and the field of its stats.
COUNTERS = (
    ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", "prefix_queries"),
    ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", "prefix_hits"),
    ("images_encoded", "Images that the vision encoder has encoded.", "images_encoded"),
    (
        "image_cache_hits",
        "Images of prompts whose embeddings were in the cache.",
        "image_cache_hits",
    ),
    (
        "state_snapshot_hits",
        "Requests that started from the kept state of a prefix.",
        "snapshot_hits",
    ),
    ("num_preemptions", "Preempted requests, which are recomputed.", "preemptions"),
    ("prompt_tokens", "Prompt tokens computed.", "prompt_tokens"),
    ("graph_rows", "Rows of steps that ran as a CUDA graph, without padding.", "graph_rows"),
    ("graph_padding_rows", "Padding rows of steps that ran as a CUDA graph.", "graph_padding"),
    ("generation_tokens", "Tokens generated.", "generated_tokens"),
    ("device_busy_seconds", "Time in which the device ran steps.", "device_busy"),
    (
        "device_idle_seconds",
        "Time in which the device waited for the host while there were requests.",
        "device_idle",
    ),
    ("spec_decode_num_drafts", "Drafts.", "drafts"),
    ("spec_decode_num_draft_tokens", "Draft tokens.", "drafted"),
    ("spec_decode_num_accepted_tokens", "Accepted draft tokens.", "accepted"),
)
gauge = partial(MetricSample, GaugeMetricFamily)
counter = partial(MetricSample, CounterMetricFamily)


def samples(client: EngineClient) -> Iterator[MetricSample]:
    """The numbers of one engine."""
    yield gauge("up", "1 while the engine can serve.", 0.0 if client.unhealthy_reason else 1.0)
    stats = client.stats
    if stats is None:
        return
    used = stats.kv_blocks_used / max(stats.kv_blocks_total, 1)
    yield gauge("num_requests_running", "Running requests.", stats.running)
    yield gauge("num_requests_waiting", "Waiting requests.", stats.waiting)
    yield gauge("kv_cache_usage_perc", "Share of the KV cache blocks in use, 0 to 1.", used)
    yield gauge("kv_cache_tokens", "Tokens in the KV cache.", stats.kv_tokens_used)
    yield gauge("state_snapshots", "States of prefixes that are kept.", stats.snapshots_held)
    yield gauge("host_step_milliseconds", "Host time per step.", stats.host_ms)
    yield gauge("step_prompt_tokens_limit", "Most prompt tokens of a step.", stats.prompt_limit)
    if stats.drafts:
        yield gauge(
            "spec_decode_draft_acceptance_rate",
            "Share of the draft tokens that were accepted, 0 to 1.",
            stats.acceptance_rate,
        )
        yield gauge(
            "spec_decode_mean_acceptance_length",
            "Mean number of tokens of a step with a draft, with the one after the draft.",
            stats.acceptance_length,
        )
    yield counter("engine_restarts", "Restarts of the engine after it died.", client.restarts)
    for name, text, field_name in COUNTERS:
        yield counter(name, text, getattr(stats, field_name))
    for kind, steps in stats.steps.items():
        yield counter("steps", "Steps by kind of execution.", steps, {"kind": kind})
    # Two numbers per layer; GET /experts has all.
    for layer, counts in stats.expert_load.items():
        yield counter(
            "expert_tokens", "Tokens of all experts of a layer.", sum(counts), {"layer": layer}
        )
        yield gauge(
            "expert_load_imbalance",
            "Tokens of the busiest expert of a layer, divided by the mean of its experts.",
            max(counts) * len(counts) / max(sum(counts), 1),
            {"layer": layer},
        )
