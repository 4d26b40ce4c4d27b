"""A step while requests are selected for it, and until it is finished."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from atomc.runtime.requests.request import Request
from atomc.runtime.scheduling.step import Chunk, ScheduledStep


@dataclass
class StepInFlight:
    """A scheduled step that is not finished.

    requests     one per chunk
    admissions   num_admissions of each request when the step was scheduled
    """

    step: ScheduledStep
    requests: list[Request]
    admissions: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.admissions = [request.num_admissions for request in self.requests]

    def __iter__(self) -> Iterator[tuple[Chunk, Request, int]]:
        return zip(self.step.chunks, self.requests, self.admissions, strict=True)


@dataclass
class StepBuilder:
    """A step under construction. budget: tokens that may still be added."""

    pooled: bool
    budget: int
    chunks: list[Chunk] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)

    def accepts(self, request: Request) -> bool:
        """Whether this kind of request may be in the step."""
        return (request.pooling is not None) == self.pooled

    def add(self, request: Request, chunk: Chunk) -> None:
        self.chunks.append(chunk)
        self.requests.append(request)
        self.budget -= chunk.num_tokens
