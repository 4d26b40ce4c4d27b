"""Metrics of a benchmark run: throughput, and the latencies of its requests."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import TypedDict

import numpy as np

PERCENTILES = (50, 90, 95, 99)
# name -> description
LATENCIES = {
    "ttft": "time to first token",
    "tpot": "time per output token after the first, mean of a request",
    "itl": "inter-token latency, the time between two chunks of a stream",
    "e2e": "time to the end of the response",
}


@dataclass
class RequestTiming:
    """Timing of one request, in seconds since the start of the run.

    times           arrival time of each chunk of the response; a chunk has one or more tokens
    output_tokens   as reported by the server, else the number of chunks
    error           why the response is not complete; None if it is
    """

    start: float
    times: list[float] = field(default_factory=list)
    end: float = 0.0
    input_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None

    @property
    def ttft(self) -> float:
        return (self.times[0] if self.times else self.end) - self.start

    @property
    def e2e(self) -> float:
        return self.end - self.start

    @property
    def tpot(self) -> float | None:
        """None for a response of one token."""
        return (self.e2e - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else None

    @property
    def inter_token_latencies(self) -> list[float]:
        return [after - before for before, after in pairwise(self.times)]


def latencies(done: Sequence[RequestTiming]) -> dict[str, list[float]]:
    """Seconds, by name in LATENCIES."""
    return {
        "ttft": [each.ttft for each in done],
        "tpot": [each.tpot for each in done if each.tpot is not None],
        "itl": [gap for each in done for gap in each.inter_token_latencies],
        "e2e": [each.e2e for each in done],
    }


class Summary(TypedDict):
    """Metrics of a run. *_ms: mean, percentiles and maximum in milliseconds, or empty."""

    completed: int
    failed: int
    errors: dict[str, int]
    seconds: float
    input_tokens: int
    output_tokens: int
    requests_per_second: float
    output_tokens_per_second: float
    total_tokens_per_second: float
    most_at_once: int
    ttft_ms: dict[str, float]
    tpot_ms: dict[str, float]
    itl_ms: dict[str, float]
    e2e_ms: dict[str, float]


def summarize(requests: Sequence[RequestTiming]) -> Summary:
    """The metrics of a run. Throughput counts complete responses, from the first start to the
    last end.
    """
    done = [each for each in requests if each.error is None]
    errors = Counter(each.error for each in requests if each.error is not None)
    seconds = max((each.end for each in requests), default=0.0) - min(
        (each.start for each in requests), default=0.0
    )
    num_input_tokens = sum(each.input_tokens for each in done)
    num_output_tokens = sum(each.output_tokens for each in done)
    seconds_of = latencies(done)

    def rate(count: int) -> float:
        return count / seconds if seconds > 0 else 0.0

    return {
        "completed": len(done),
        "failed": len(requests) - len(done),
        "errors": dict(errors.most_common()),
        "seconds": seconds,
        "input_tokens": num_input_tokens,
        "output_tokens": num_output_tokens,
        "requests_per_second": rate(len(done)),
        "output_tokens_per_second": rate(num_output_tokens),
        "total_tokens_per_second": rate(num_input_tokens + num_output_tokens),
        "most_at_once": max_concurrent_requests(requests),
        "ttft_ms": distribution(seconds_of["ttft"]),
        "tpot_ms": distribution(seconds_of["tpot"]),
        "itl_ms": distribution(seconds_of["itl"]),
        "e2e_ms": distribution(seconds_of["e2e"]),
    }


def max_concurrent_requests(requests: Sequence[RequestTiming]) -> int:
    """The maximum number of requests that ran at the same time."""
    changes = sorted([(each.start, 1) for each in requests] + [(each.end, -1) for each in requests])
    return max(accumulate((change for _, change in changes), initial=0))


def distribution(seconds: Sequence[float]) -> dict[str, float]:
    """Mean, percentiles and maximum in milliseconds; empty for no values."""
    if not seconds:
        return {}
    values = 1e3 * np.asarray(seconds)
    percentiles = zip(PERCENTILES, np.percentile(values, PERCENTILES).tolist(), strict=True)
    return {
        "mean": float(values.mean()),
        **{f"p{percent}": value for percent, value in percentiles},
        "max": float(values.max()),
    }


def format_summary(found: Summary) -> str:
    """The metrics as a table for a terminal."""
    failed = f", {found['failed']} failed" if found["failed"] else ""
    lines = [
        f"{found['completed']} requests in {found['seconds']:.2f} s{failed}, at most "
        f"{found['most_at_once']} at once",
        f"  {found['input_tokens']:,} tokens in, {found['output_tokens']:,} out",
        "",
    ]
    rates = {
        "requests/s": found["requests_per_second"],
        "output tokens/s": found["output_tokens_per_second"],
        "all tokens/s": found["total_tokens_per_second"],
    }
    lines += [f"{label:<18}{rate:>10,.{2 if rate < 100 else 0}f}" for label, rate in rates.items()]
    columns = ["mean", *(f"p{percent}" for percent in PERCENTILES), "max"]
    lines += ["", f"{'milliseconds':<18}" + "".join(f"{column:>10}" for column in columns)]
    distributions = (found["ttft_ms"], found["tpot_ms"], found["itl_ms"], found["e2e_ms"])
    for name, values in zip(LATENCIES, distributions, strict=True):
        if values:
            lines.append(
                f"{name.upper():<18}" + "".join(f"{values[column]:>10,.2f}" for column in columns)
            )
    lines += ["", *(f"failed x{count}: {error}" for error, count in found["errors"].items())]
    return "\n".join(lines).rstrip()
