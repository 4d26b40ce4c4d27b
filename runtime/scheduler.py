"""Which requests compute how many of their tokens in the next step."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from atomc.runtime.blocks import BlockPool
from atomc.runtime.draw import Draw
from atomc.runtime.request import Request


@dataclass(frozen=True)
class Chunk:
    """The tokens of one request that a step computes: a prompt, a part of one, or the last drawn token.

    start   position of the first; all tokens before it are in the cache
    blocks  the block table, which covers these tokens and all before
    draw    how the token after the last is drawn; None if the request has more tokens to compute first
    """

    request_id: str
    tokens: tuple[int, ...]
    start: int
    blocks: tuple[int, ...]
    draw: Draw | None


@dataclass(frozen=True)
class ScheduledStep:
    """The decision about one step; at least one chunk."""

    chunks: tuple[Chunk, ...]
    block_size: int

    @property
    def num_tokens(self) -> int:
        return sum(len(chunk.tokens) for chunk in self.chunks)

    @property
    def draws(self) -> tuple[Draw, ...]:
        """One for each token that the step yields, in the order of the chunks."""
        return tuple(chunk.draw for chunk in self.chunks if chunk.draw is not None)


class QueueFull(Exception):
    """Too many requests wait. Try again after retry_after seconds."""

    def __init__(self, waiting: int, retry_after: float) -> None:
        super().__init__(f"{waiting} requests wait already, the queue takes no more: try again in {retry_after:.0f} s")
        self.retry_after = retry_after


class Scheduler:
    """Continuous batching: first come, first served; prompts in chunks; the newest request gives way.

    `running` requests own blocks and `waiting` ones do not; both are in the order of arrival, and whoever runs came
    before whoever waits. A request that gives way waits at the front and computes all its tokens again.

    Raises ValueError for limits below 1.
    """

    def __init__(
        self, pool: BlockPool, *, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int,
        max_queue: int = 1024,
    ) -> None:  # fmt: skip
        for name, value in (("max_num_seqs", max_num_seqs), ("max_num_batched_tokens", max_num_batched_tokens),
                            ("max_model_len", max_model_len)):  # fmt: skip
            if value < 1:
                raise ValueError(f"{name} is {value}, it must be at least 1")
        self.pool = pool
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_queue = max_queue
        # Tokens of the longest request: it must be able to finish when it has the pool for itself.
        self.max_len = min(max_model_len, pool.num_tokens)
        self.requests: dict[str, Request] = {}
        self.running: list[Request] = []
        self.waiting: deque[Request] = deque()

    def refuse(self, request: Request) -> None:
        """Raise ValueError if the request's prompt can never fit, or its id is in use."""
        if request.num_prompt >= self.max_len:
            raise ValueError(
                f"request {request.id!r}: a prompt of {request.num_prompt} tokens does not fit, at most "
                f"{self.max_len - 1} do (one token is to follow, and a sequence has at most {self.max_len}); shorten "
                "it, or raise max_model_len or the size of the cache"
            )
        if request.id in self.requests:
            raise ValueError(f"request id {request.id!r} is in use")

    def add(self, request: Request) -> None:
        """Queue a request. Raises what `refuse` raises, and QueueFull if too many wait."""
        self.refuse(request)
        if len(self.waiting) >= self.max_queue:
            raise QueueFull(len(self.waiting), retry_after=1.0)
        self.requests[request.id] = request
        self.waiting.append(request)

    def next_step(self) -> ScheduledStep | None:
        """Running requests first, oldest first; then admit new ones while tokens, sequences and blocks last.

        None if there is no request. The step counts only when it is finished: if running it failed, ask again.
        """
        budget = self.max_num_batched_tokens
        chunks: list[Chunk] = []
        while len(chunks) < len(self.running) and budget:
            request = self.running[len(chunks)]
            count = min(request.pending, budget)
            if not self._make_room(request, request.computed + count):
                break
            chunks.append(self._chunk(request, count))
            budget -= count
        while self.waiting and budget and len(self.running) < self.max_num_seqs:
            request = self.waiting[0]
            # Blocks for all its tokens, also if they take several steps: it is not to give way halfway.
            if not self.pool.reserve(request.id, len(request.tokens)):
                break
            self.running.append(self.waiting.popleft())
            count = min(request.pending, budget)
            chunks.append(self._chunk(request, count))
            budget -= count
        assert chunks or not (self.running or self.waiting), "requests, and none of them fits"
        return ScheduledStep(tuple(chunks), self.pool.block_size) if chunks else None

    def finish_step(self, step: ScheduledStep, tokens: Sequence[int]) -> list[Request]:
        """Take the drawn tokens, one for each of step.draws, and return the requests that finished.

        A request aborted while the step ran is passed over.
        """
        drawn = iter(tokens)
        finished = []
        for chunk in step.chunks:
            token = next(drawn) if chunk.draw is not None else None
            request = self.requests.get(chunk.request_id)
            if request is None:
                continue
            assert request.computed == chunk.start, f"step of another time: {chunk} for {request}"
            request.computed += len(chunk.tokens)
            if token is not None:
                request.accept(token, self.max_len)
            if request.finish_reason is not None:
                finished.append(request)
        assert next(drawn, None) is None, f"{len(tokens)} tokens for {len(step.draws)} draws"
        for request in finished:
            self.running.remove(request)
            self._forget(request)
        return finished

    def abort(self, request_id: str) -> bool:
        """Drop a request and its blocks; False if there is none of this id (it may just have finished)."""
        request = self.requests.get(request_id)
        if request is None:
            return False
        (self.running if request in self.running else self.waiting).remove(request)
        self._forget(request)
        request.finish_reason = "abort"
        return True

    def check(self) -> None:
        """Assert what holds between two calls."""
        self.pool.check()
        requests = [*self.running, *self.waiting]
        assert sorted(self.requests) == sorted(request.id for request in requests), "a request is lost, or is twice"
        assert len(self.running) <= self.max_num_seqs, "more sequences than allowed"
        assert self.pool.owners == {request.id for request in self.running}, "who runs and who owns blocks differ"
        for request in requests:
            assert request.finish_reason is None and request.pending > 0, f"nothing to compute for {request}"
            assert len(request.tokens) < self.max_len, f"too long: {request}"
        for request in self.running:
            held = len(self.pool.table(request.id)) * self.pool.block_size
            assert request.computed <= held, f"{request.computed} tokens in blocks for {held}"
        for request in self.waiting:
            assert request.computed == 0, f"{request.id} waits and has {request.computed} tokens in no block"

    def _make_room(self, request: Request, num_tokens: int) -> bool:
        """Reserve blocks for num_tokens, the newest requests giving way. False if this was the newest and gave way."""
        while not self.pool.reserve(request.id, num_tokens):
            newest = self.running.pop()
            self.pool.release(newest.id)
            newest.computed = 0
            self.waiting.appendleft(newest)
            if newest is request:
                return False
        return True

    def _forget(self, request: Request) -> None:
        self.pool.release(request.id)
        del self.requests[request.id]

    def _chunk(self, request: Request, count: int) -> Chunk:
        start, end = request.computed, request.computed + count
        draw = request.next_draw() if end == len(request.tokens) else None
        return Chunk(request.id, tuple(request.tokens[start:end]), start, self.pool.table(request.id), draw)
