"""The schedulers of data-parallel ranks that run one model together, as one scheduler.

Each rank has requests and blocks of its own. The ranks step together, because the tokens of a step
travel to the ranks of their experts: a rank without work takes part with padding.
"""

from collections import ChainMap, deque
from collections.abc import Mapping, Sequence
from itertools import islice

from atomc.runtime.requests.request import FinishReason, Output, Request
from atomc.runtime.scheduling.blocks import BlockPool
from atomc.runtime.scheduling.scheduler import QueueFull, Scheduler
from atomc.runtime.scheduling.stats import Counters
from atomc.runtime.scheduling.step import Chunk, ScheduledStep

IDLE = ScheduledStep(())


class DataParallelScheduler:
    """Has the methods of a Scheduler that the engine calls. A request goes to the rank with the
    fewest, of several the first; the choices of one prompt go to one rank, whose blocks they share.

    max_queue  requests that wait, of all ranks
    """

    def __init__(self, ranks: Sequence[Scheduler], max_queue: int) -> None:
        self.ranks, self.max_queue = ranks, max_queue
        self.max_len = min(rank.max_len for rank in ranks)
        self.state_rows = ranks[0].state_rows
        self._in_flight: deque[ScheduledStep] = deque()
        self._last = "", ranks[0]  # prompt and rank of the last request

    @property
    def pools(self) -> Sequence[BlockPool]:
        return [rank.pool for rank in self.ranks]

    @property
    def requests(self) -> Mapping[str, Request]:
        return ChainMap(*[rank.queues.requests for rank in self.ranks])

    @property
    def running(self) -> Sequence[Request]:
        return [request for rank in self.ranks for request in rank.running]

    @property
    def waiting(self) -> Sequence[Request]:
        return [request for rank in self.ranks for request in rank.waiting]

    @property
    def num_snapshots(self) -> int:
        return sum(rank.num_snapshots for rank in self.ranks)

    @property
    def counters(self) -> Counters:
        """The sums over ranks."""
        of_ranks = [vars(rank.counters) for rank in self.ranks]
        return Counters(**{name: sum(one[name] for one in of_ranks) for name in of_ranks[0]})

    @property
    def num_streams(self) -> int:
        """As in Scheduler, of the rank with the most."""
        return max(rank.num_streams for rank in self.ranks)

    @property
    def num_steps_in_flight(self) -> int:
        return len(self._in_flight)

    def step_requests(self, index: int) -> Sequence[tuple[Request, Chunk | None]]:
        """As in Scheduler, of one rank after the other."""
        parts = self._parts(self._in_flight[index])
        return [each for rank, _ in parts for each in rank.step_requests(index)]

    def _parts(self, step: ScheduledStep) -> list[tuple[Scheduler, ScheduledStep]]:
        """The ranks that have a part of the step, and their parts."""
        parts = zip(self.ranks, step.parts, strict=True)
        return [(rank, part) for rank, part in parts if part is not IDLE]

    def forget_counts(self) -> None:
        for rank in self.ranks:
            rank.forget_counts()

    def reset_prefix_cache(self) -> None:
        for rank in self.ranks:
            rank.reset_prefix_cache()

    def evict(self, request_id: str) -> None:
        for rank in self.ranks:
            rank.evict(request_id)

    def refuse(self, request: Request) -> None:
        for rank in self.ranks:
            rank.refuse(request)

    def add(self, request: Request) -> None:
        self.refuse(request)
        if (waiting := len(self.waiting)) >= self.max_queue:
            raise QueueFull(f"{waiting} requests wait already")
        prompt = request.id.partition("/")[0]
        of_last, rank = self._last
        if prompt != of_last:
            rank = min(self.ranks, key=lambda rank: len(rank.requests))
        rank.add(request)
        self._last = prompt, rank

    def abort(self, request_id: str, reason: FinishReason = "abort") -> bool:
        return any([rank.abort(request_id, reason) for rank in self.ranks])

    def next_step(self, prompt_limit: int | None = None) -> ScheduledStep | None:
        """The next steps of all ranks as one; None if no rank has any. prompt_limit: of each."""
        step = ScheduledStep(
            (), parts=tuple([rank.next_step(prompt_limit) or IDLE for rank in self.ranks])
        )
        if not self._parts(step):
            return None
        self._in_flight.append(step)
        return step

    def finish_step(
        self, step: ScheduledStep, tokens: Sequence[Sequence[int]], decoded: Sequence[int] = ()
    ) -> list[Output]:
        first = self._in_flight.popleft()
        assert first is step, "steps finish in the order in which they were scheduled"
        outputs, of_chunks, of_rows = [], iter(tokens), iter(decoded)
        for rank, part in self._parts(step):
            outputs += rank.finish_step(
                part,
                list(islice(of_chunks, len(part.chunks))),
                list(islice(of_rows, part.num_decoding)),
            )
        return outputs

    def undo_step(self, step: ScheduledStep) -> None:
        last = self._in_flight.pop()
        assert last is step, "only the last step can be undone"
        for rank, part in self._parts(step):
            rank.undo_step(part)

    def check(self) -> None:
        for rank in self.ranks:
            rank.check()
