"""The figures of a run: throughput, and how long requests waited for their first token, each further one, and the end."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

PERCENTILES = (50, 90, 95, 99)
# name -> what it is
LATENCIES = {
    "ttft": "time to the first token",
    "tpot": "time per token after the first, mean of a request",
    "itl": "time between two pieces of an answer",
    "e2e": "time to the end of the answer",
}


@dataclass
class Timed:
    """One request, in seconds since the run began.

    times          when each piece of the answer came; a piece is one token, or several that came together
    output_tokens  as the server counts them, else the number of pieces
    error          why there is no whole answer, None if there is
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
        """None for an answer of one token."""
        return (self.e2e - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else None

    @property
    def gaps(self) -> list[float]:
        return [after - before for before, after in pairwise(self.times)]


def latencies(done: Sequence[Timed]) -> dict[str, list[float]]:
    """Seconds, by the names of LATENCIES."""
    return {
        "ttft": [each.ttft for each in done],
        "tpot": [each.tpot for each in done if each.tpot is not None],
        "itl": [gap for each in done for gap in each.gaps],
        "e2e": [each.e2e for each in done],
    }


def figures(requests: Sequence[Timed]) -> dict[str, Any]:
    """Plain data. Throughput counts whole answers only, over the time from the first start to the last end."""
    done = [each for each in requests if each.error is None]
    errors = Counter(each.error for each in requests if each.error is not None)
    seconds = max((each.end for each in requests), default=0.0) - min((each.start for each in requests), default=0.0)
    given, made = sum(each.input_tokens for each in done), sum(each.output_tokens for each in done)

    def rate(count: int) -> float:
        return count / seconds if seconds > 0 else 0.0

    return {
        "completed": len(done),
        "failed": len(requests) - len(done),
        "errors": dict(errors.most_common()),
        "seconds": seconds,
        "input_tokens": given,
        "output_tokens": made,
        "requests_per_second": rate(len(done)),
        "output_tokens_per_second": rate(made),
        "total_tokens_per_second": rate(given + made),
        "most_at_once": most_at_once(requests),
        **{f"{name}_ms": spread(values) for name, values in latencies(done).items()},
    }


def most_at_once(requests: Sequence[Timed]) -> int:
    """The number of requests under way, at most."""
    changes = sorted([(each.start, 1) for each in requests] + [(each.end, -1) for each in requests])
    now = most = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return most


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """Mean, percentiles and maximum in milliseconds; empty for no values."""
    if not seconds:
        return {}
    ordered = sorted(seconds)
    found = {"mean": sum(ordered) / len(ordered)}
    found |= {f"p{percent}": percentile(ordered, percent) for percent in PERCENTILES} | {"max": ordered[-1]}
    return {name: 1e3 * value for name, value in found.items()}


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Linear between the two nearest of the ordered values."""
    place = (len(ordered) - 1) * percent / 100
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def text(found: dict[str, Any]) -> str:
    """For a terminal."""
    failed = f", {found['failed']} failed" if found["failed"] else ""
    lines = [f"{found['completed']} requests in {found['seconds']:.2f} s{failed}, at most {found['most_at_once']} at once",
             f"  {found['input_tokens']:,} tokens in, {found['output_tokens']:,} out", ""]  # fmt: skip
    rates = {"requests/s": "requests_per_second", "output tokens/s": "output_tokens_per_second",
             "all tokens/s": "total_tokens_per_second"}  # fmt: skip
    lines += [f"{label:<18}{found[name]:>10,.{2 if found[name] < 100 else 0}f}" for label, name in rates.items()]
    columns = ["mean", *(f"p{percent}" for percent in PERCENTILES), "max"]
    lines += ["", f"{'milliseconds':<18}" + "".join(f"{column:>10}" for column in columns)]
    for name in LATENCIES:
        if values := found[f"{name}_ms"]:
            lines.append(f"{name.upper():<18}" + "".join(f"{values[column]:>10,.2f}" for column in columns))
    lines += ["", *(f"failed x{count}: {error}" for error, count in found["errors"].items())]
    return "\n".join(lines).rstrip()
