"""Statistics of an engine."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace


@dataclass(kw_only=True)
class Counters:
    """What the scheduler counts, in total since the start; see Stats."""

    preemptions: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    snapshots: int = 0
    snapshot_hits: int = 0
    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    images_encoded: int = 0
    image_cache_hits: int = 0


@dataclass(kw_only=True)
class StepCounts:
    """What is counted of the steps that ran, and of their CUDA graphs; see Stats."""

    steps: Mapping[str, int] = field(default_factory=dict)
    graphs: int = 0
    graph_rows: int = 0
    graph_padding: int = 0
    device_busy: float = 0.0
    device_idle: float = 0.0
    expert_load: Mapping[str, Sequence[int]] = field(default_factory=dict)


@dataclass(kw_only=True)
class Stats(Counters, StepCounts):
    """Counters since the start, and current gauges.

    kv_blocks_used    blocks used by requests; unused cached blocks count as free
    kv_tokens         capacity of the KV cache in tokens
    kv_tokens_used    tokens that the cache holds for requests; a used block may hold few of its
                      tokens
    max_len           maximum sequence length in tokens
    prefix_queries    prompt tokens looked up in the prefix cache; prefix_hits: tokens found
    snapshots         states of prefixes that were kept, for models with state per sequence;
                      snapshot_hits: requests that started from one, snapshots_held: of them now,
                      snapshots_total: their maximum
    steps             number of steps by kind: "full graph", "piecewise", or "eager: " with the
                      reason
    graphs            CUDA graphs that steps of text have now
    graph_rows        rows of steps that ran as a CUDA graph, without graph_padding, the padding
                      rows
    host_ms           host time per step in milliseconds, mean of the last steps, without waiting
                      for the device
    device_busy       seconds in which the device ran steps; device_idle: in which it waited for the
                      host while requests were there, between two steps or before one is sampled.
                      Both are 0 on a CPU; with several ranks, those of rank 0
    prompt_limit      the most prompt tokens of the next step (max_itl_ms)
    expert_load       tokens that each expert got, by the path of the layer's experts; {} unless
                      they are counted
    drafts            number of drafts that were verified; drafted: their tokens; accepted: those
                      that were kept
    images_encoded    images that the vision encoder has encoded; image_cache_hits: those of prompts
                      whose embeddings were in the cache
    no_prefix_cache   why there is no prefix cache; empty if there is one
    """

    running: int
    waiting: int
    kv_blocks_used: int
    kv_blocks_total: int
    kv_tokens: int
    max_len: int
    kv_tokens_used: int = 0
    snapshots_held: int = 0
    snapshots_total: int = 0
    host_ms: float = 0.0
    prompt_limit: int = 0
    no_prefix_cache: str = ""

    @property
    def device_idle_share(self) -> float | None:
        """Share of the time with requests in which the device waited for the host; None if nothing
        was measured.
        """
        total = self.device_busy + self.device_idle
        return self.device_idle / total if total else None

    @property
    def acceptance_rate(self) -> float:
        """Share of the draft tokens that were accepted; 0 without drafts."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def acceptance_length(self) -> float:
        """Mean number of tokens of a step with a draft, with the one after the draft."""
        return 1 + self.accepted / self.drafts if self.drafts else 0.0


def total(engines: Sequence[Stats]) -> Stats:
    """The sums over engines of the same model. max_len and prompt_limit are the smallest, host_ms
    the largest.
    """
    first = engines[0]
    steps: Counter[str] = Counter()
    for stats in engines:
        steps.update(stats.steps)
    sums = {
        name: sum(getattr(stats, name) for stats in engines)
        for name, value in vars(first).items()
        if isinstance(value, int | float)
    }
    for name in ("max_len", "prompt_limit"):
        sums[name] = min(getattr(stats, name) for stats in engines)
    sums["host_ms"] = max(stats.host_ms for stats in engines)
    expert_load = sum_of_loads(stats.expert_load for stats in engines)
    return replace(first, **sums | {"steps": dict(steps), "expert_load": expert_load})


def sum_of_loads(loads: Iterable[Mapping[str, Sequence[int]]]) -> dict[str, list[int]]:
    """Tokens of each expert by layer, added up."""
    sums: dict[str, list[int]] = {}
    for load in loads:
        for path, counts in load.items():
            before = sums.get(path, [0] * len(counts))
            sums[path] = [a + b for a, b in zip(before, counts, strict=True)]
    return sums
