"""What an engine has done and what it is doing, as plain numbers."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Stats:
    """Counters since the start, and gauges of this moment.

    kv_blocks_used   blocks that requests own or share; cached ones that nobody uses count as free
    prefix_queries   prompt tokens looked up in the prefix cache; prefix_hits of them were found
    steps            how many steps ran how: "full graph", "piecewise", or "eager: " and the reason
    graph_rows       rows of the steps that ran as a graph; graph_padding more were added to fit one
    host_ms          milliseconds of Python a step, mean of the last steps, waiting for the device left out
    no_prefix_cache  why there is no prefix cache; empty: there is one
    kv_tokens        tokens that the whole cache holds; max_len: tokens of the longest sequence
    kv_tokens_used   tokens that it holds for requests; a block of the contiguous layout is taken whole by a sequence,
                     however few they are
    """

    running: int
    waiting: int
    kv_blocks_used: int
    kv_blocks_total: int
    kv_tokens: int
    max_len: int
    kv_tokens_used: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    steps: Mapping[str, int] = field(default_factory=dict)
    graph_rows: int = 0
    graph_padding: int = 0
    host_ms: float = 0.0
    drafted: int = 0
    accepted: int = 0
    no_prefix_cache: str = ""
