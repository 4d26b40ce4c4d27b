"""Which requests compute how many of their tokens in the next step."""

from bisect import insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from atomc.runtime.blocks import BlockPool
from atomc.runtime.prefix_cache import extend_keys
from atomc.runtime.request import FinishReason, Output, Request
from atomc.runtime.request_errors import RequestErrors
from atomc.runtime.step import Admission, Chunk, ScheduledStep

# Log-probabilities of prompts take a row of the vocabulary in fp32 for each token.
MOST_SCORED_ROWS = 128
SEED_BITS = 2**64 - 1


class QueueFull(Exception):
    """Too many requests wait. Try again after retry_after seconds."""

    def __init__(self, waiting: int, retry_after: float) -> None:
        super().__init__(
            f"{waiting} requests wait already, the queue takes no more: try again in "
            f"{retry_after:.0f} s"
        )
        self.retry_after = retry_after


@dataclass
class Counters:
    """What a scheduler has done since it was made; see Stats."""

    preemptions: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    drafted: int = 0
    accepted: int = 0


@dataclass
class _Flight:
    """A step that was decided and is not finished, its requests, and which admission of them it
    belongs to.
    """

    step: ScheduledStep
    requests: list[Request]
    admissions: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.admissions = [request.admitted for request in self.requests]


@dataclass
class _Deciding:
    """A step while it is decided: its chunks and their requests, and how many tokens more it
    takes.
    """

    pooled: bool
    budget: int
    chunks: list[Chunk] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)

    def takes(self, request: Request) -> bool:
        """Whether it is a step for this kind of request."""
        return (request.pooling is not None) == self.pooled


class Scheduler:
    """Continuous batching: prompts in chunks; whoever comes last in the order gives way when blocks
    run out.

    The order is that of arrival; with policy "priority" the lowest priority comes first, and those
    of equal priority in the order of arrival. `running` requests own blocks and `waiting` ones do
    not; both are in order. Who gives way waits, and computes all its tokens again that the prefix
    cache has lost.

    Several steps may be decided before the first of them is finished; they are finished in the same
    order. Whatever is released may be used by the next step at once: the device runs one step after
    the other.

    Errors of a single request go to `request_errors`; the request may still be in steps until it is
    aborted.

    can_roll_back   as in Limits

    Raises ValueError for limits below 1.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        max_queue: int = 1024,
        policy: str = "fcfs",
        request_errors: RequestErrors | None = None,
        can_roll_back: bool = True,
    ) -> None:
        for name, value in (
            ("max_num_seqs", max_num_seqs),
            ("max_num_batched_tokens", max_num_batched_tokens),
            ("max_model_len", max_model_len),
        ):
            if value < 1:
                raise ValueError(f"{name} is {value}, it must be at least 1")
        self.pool = pool
        self.request_errors = request_errors or RequestErrors()
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_queue = max_queue
        self.by_priority = policy == "priority"
        self.can_roll_back = can_roll_back
        # Tokens of the longest request: it must be able to finish when it has the pool for itself.
        self.max_len = min(max_model_len, pool.longest(2 * max_num_batched_tokens))
        self.requests: dict[str, Request] = {}
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.counters = Counters()
        self._flights: deque[_Flight] = deque()
        self._free_slots = list(reversed(range(max_num_seqs)))
        # Slots that were left since the last step.
        self._released: set[int] = set()
        # Keys of blocks that running requests are about to fill, and who.
        self._computing: dict[bytes, Request] = {}
        self._num_added = 0
        self._num_pooled = 0
        self._pooled_last = False

    @property
    def num_flights(self) -> int:
        """Steps that were decided and are not finished."""
        return len(self._flights)

    @property
    def first_requests(self) -> Sequence[Request]:
        """The requests of the step that is finished next, one for each chunk."""
        return self._flights[0].requests

    def forget_counts(self) -> None:
        """As if nothing had been done yet; there are no requests."""
        assert not self.requests and self.pool.drop_cached(), "requests are running"
        self.counters = Counters()

    def refuse(self, request: Request) -> None:
        """Raise ValueError if the request's prompt can never fit, or its id is in use."""
        longest = self.max_len if request.pooling else self.max_len - 1
        if request.num_prompt > longest:
            raise ValueError(
                f"request {request.id!r}: a prompt of {request.num_prompt} tokens does not "
                f"fit, at most {longest} do"
                + (
                    ""
                    if request.pooling
                    else f" (one token is to follow, and a sequence has at most {self.max_len})"
                )
                + "; shorten it, or raise max_model_len or the size of the cache"
            )
        if request.id in self.requests:
            raise ValueError(f"request id {request.id!r} is in use")

    def add(self, request: Request) -> None:
        """Queue a request. Raises what `refuse` raises, and QueueFull if too many wait."""
        self.refuse(request)
        if len(self.waiting) >= self.max_queue:
            raise QueueFull(len(self.waiting), retry_after=1.0)
        request.number = self._num_added
        self._num_added += 1
        self._num_pooled += request.pooling is not None
        self.requests[request.id] = request
        insort(self.waiting, request, key=self._rank)

    def next_step(self) -> ScheduledStep | None:
        """Running requests first, in order; then admit new ones while tokens, sequences and blocks
        last.

        None if there is nothing to do, or not before a step in flight is finished. Steps of hidden
        states take turns with the others.
        """
        kinds = (not self._pooled_last, self._pooled_last) if self._num_pooled else (False,)
        for pooled in kinds:
            flight = self._decided(pooled)
            if flight is not None:
                self._pooled_last = pooled
                self._released.clear()
                self._flights.append(flight)
                return flight.step
        assert self._flights or not self.requests or self.request_errors.failed, (
            "requests, and none of them fits"
        )
        return None

    def finish_step(self, step: ScheduledStep, tokens: Sequence[Sequence[int]]) -> list[Output]:
        """Take the drawn tokens, some for each chunk that draws, and return what is new of each
        request.

        A chunk with a draft gets the tokens of it that are right and one more. A request aborted,
        or finished, while the step ran is passed over.
        """
        flight = self._flights.popleft()
        assert flight.step is step, "steps are finished in the order in which they were decided"
        drawn = iter(tokens)
        outputs = []
        for chunk, request, admission in zip(
            step.chunks, flight.requests, flight.admissions, strict=True
        ):
            new = next(drawn) if chunk.num_draws else ()
            if request.finish_reason is None:
                output = self.request_errors.run(
                    request.id,
                    "taking its new tokens",
                    self._finish,
                    chunk,
                    request,
                    admission,
                    new,
                )
                outputs += [output] if output is not None else []
        assert next(drawn, None) is None, (
            f"{len(tokens)} lots of tokens for a step that draws fewer"
        )
        return outputs

    def undo_step(self, step: ScheduledStep) -> None:
        """Forget the decision made last: the step could not be run, or it is not known how far it
        came.
        """
        flight = self._flights.pop()
        assert flight.step is step, "only the last step can be undone"
        self._released.update(step.released)
        for chunk, request, admission in zip(
            step.chunks, flight.requests, flight.admissions, strict=True
        ):
            request.drawing -= bool(chunk.num_draws)
            if request.slot is not None and request.admitted == admission:
                request.announced = chunk.admission is None
                request.computed = chunk.start
                request.scored = min(request.scored, chunk.start)
                self.pool.forget_told(request.id)
                if chunk.start and not self.can_roll_back:
                    self._preempt(request)

    def abort(self, request_id: str, reason: FinishReason = "abort") -> bool:
        """Drop a request and its blocks; False if there is none of this id (it may just have
        finished).
        """
        request = self.requests.get(request_id)
        if request is None:
            return False
        request.finish_reason = reason
        self._leave(request)
        return True

    def check(self) -> None:
        """Assert what holds between two calls."""
        self.pool.check()
        self._check_queues()
        for request in (*self.running, *self.waiting):
            self._check_request(request)
        assert {request.id for request in self._computing.values()} <= self.pool.owners, (
            "keys of who does not run"
        )
        expected = sum(
            bool(chunk.num_draws)
            for flight in self._flights
            for chunk, request in zip(flight.step.chunks, flight.requests, strict=True)
            if request.finish_reason is None
        )
        drawing = sum(request.drawing for request in (*self.running, *self.waiting))
        assert expected == drawing, "tokens in flight are counted wrong"

    def _check_queues(self) -> None:
        queued = sorted(request.id for request in (*self.running, *self.waiting))
        assert sorted(self.requests) == queued, "a request is lost, or is twice"
        assert len(self.running) <= self.max_num_seqs, "more sequences than allowed"
        assert self.pool.owners == {request.id for request in self.running}, (
            "who runs and who owns blocks differ"
        )
        slots = [request.slot for request in self.running if request.slot is not None]
        assert sorted(slots + self._free_slots) == list(range(self.max_num_seqs)), (
            "a slot is lost, or has two owners"
        )
        for queue in (self.running, self.waiting):
            assert queue == sorted(queue, key=self._rank), "a queue is out of order"

    def _check_request(self, request: Request) -> None:
        assert request.finish_reason is None, f"finished, and still here: {request}"
        pending = request.pending + (len(request.draft) if request.drawing else 0)
        assert pending > 0 or (request.pooling and pending == 0), (
            f"nothing to compute for {request}"
        )
        assert request.length <= self.max_len, f"too long: {request}"
        assert (
            request.num_named * self.pool.block_size <= request.computed or request.slot is None
        ), f"named before computed: {request}"
        assert request.computed == 0 or request.slot is not None, (
            f"{request.id} waits and has {request.computed} tokens in no block"
        )

    def _decided(self, pooled: bool) -> _Flight | None:
        """The next step of this kind."""
        deciding = _Deciding(pooled, self.max_num_batched_tokens)
        if self.by_priority:
            self._make_way(pooled)
        preempted = self.counters.preemptions
        self._continue(deciding)
        if preempted == self.counters.preemptions:
            self._begin(deciding)
        if not deciding.chunks:
            return None
        step = ScheduledStep(tuple(deciding.chunks), pooled, tuple(sorted(self._released)))
        return _Flight(step, deciding.requests)

    def _continue(self, deciding: _Deciding) -> None:
        """Chunks of running requests, in order."""
        for request in self.running.copy():
            if not deciding.budget or request.slot is None:  # it, and all behind it, gave way
                return
            count = self._wanted(request, deciding.budget) if deciding.takes(request) else 0
            if count and self._make_room(request, request.computed + count):
                self._take(deciding, request, count)

    def _begin(self, deciding: _Deciding) -> None:
        """First chunks of waiting requests, in order, up to one for which there is no room."""
        for request in self.waiting.copy():
            if not deciding.budget or not self._free_slots:
                return
            if request.drawing or not deciding.takes(request) or self._awaits_others(request):
                continue
            if not self._admit(request, deciding.budget):
                return
            self._take(deciding, request, self._wanted(request, deciding.budget))

    def _take(self, deciding: _Deciding, request: Request, count: int) -> None:
        chunk = self.request_errors.run(request.id, "scheduling it", self._chunk, request, count)
        if chunk is not None:
            deciding.chunks.append(chunk)
            deciding.requests.append(request)
            deciding.budget -= count

    def _wanted(self, request: Request, budget: int) -> int:
        """So many tokens of the request can be computed now; none while the device decides about a
        draft.
        """
        if request.drawing and request.draft:
            return 0
        if request.pending + len(request.draft) == 1:
            # The common case. No token may follow the last one that fits.
            return 0 if request.drawing and not request.room(self.max_len) else 1
        count = min(request.pending + len(request.draft), budget)
        if request.params.prompt_logprobs is not None and request.scored < request.num_prompt - 1:
            count = min(count, MOST_SCORED_ROWS)
        if count < request.pending + len(request.draft):
            request.draft = request.draft[: max(count - request.pending, 0)]
        return count

    def _admit(self, request: Request, budget: int) -> bool:
        """Give a waiting request a slot, what the cache has of it, and blocks for all its tokens,
        also if they take several steps: it is not to give way halfway. False if there are not
        enough.
        """
        found = self._found(request)
        computed = found * self.pool.block_size
        now = computed + min(len(request.tokens) - computed, budget)
        if not self.pool.admit(request.id, request.keys[:found], now, len(request.tokens)):
            return False
        if not request.admitted:
            request.num_cached = computed
            self.counters.prefix_queries += len(request.tokens) if self.pool.shares else 0
            self.counters.prefix_hits += computed
        self.waiting.remove(request)
        insort(self.running, request, key=self._rank)
        request.slot = self._free_slots.pop()
        request.admitted += 1
        request.announced = False
        request.computed = computed
        request.num_named = found
        for key in request.keys[found:]:
            self._computing.setdefault(key, request)
        return True

    def _found(self, request: Request) -> int:
        """Leading blocks that are cached; at least one token is left to compute, all if each one's
        output is wanted.
        """
        if not self.pool.shares or request.pooling == "mean" or self._scores(request):
            return 0
        return (
            self.request_errors.run(
                request.id, "looking for its prefix in the cache", self._match, request
            )
            or 0
        )

    def _match(self, request: Request) -> int:
        extend_keys(request.keys, request.tokens, self.pool.block_size, request.salt)
        return self.pool.match(request.keys[: (len(request.tokens) - 1) // self.pool.block_size])

    def _awaits_others(self, request: Request) -> bool:
        """Whether a running request is about to compute the next block that this one needs."""
        if not self._computing:
            return False
        found = self._found(request)
        return (
            found < (len(request.tokens) - 1) // self.pool.block_size
            and bool(request.keys)
            and (request.keys[found] in self._computing)
        )

    def _make_way(self, pooled: bool) -> None:
        """Whoever runs gives way to whoever waits and is more urgent."""
        for request in self.waiting.copy():
            if (
                request.drawing
                or (request.pooling is not None) != pooled
                or self._awaits_others(request)
            ):
                continue
            while (
                self.running
                and self.running[-1].priority > request.priority
                and not self._fits(request)
            ):
                self._preempt(self.running[-1])
            if not self._fits(request):
                return

    def _fits(self, request: Request) -> bool:
        if not self._free_slots:
            return False
        found = self._found(request)
        now = found * self.pool.block_size + self.max_num_batched_tokens
        return self.pool.has_room(
            request.keys[:found], min(now, len(request.tokens)), len(request.tokens)
        )

    def _make_room(self, request: Request, num_tokens: int) -> bool:
        """Reserve blocks for num_tokens, the last in the order giving way. False if this was the
        last and gave way.
        """
        while not self.pool.reserve(request.id, num_tokens):
            last = self.running[-1]
            self._preempt(last)
            if last is request:
                return False
        return True

    def _preempt(self, request: Request) -> None:
        self._stop_running(request)
        request.computed = 0
        request.draft = ()
        insort(self.waiting, request, key=self._rank)
        self.counters.preemptions += 1

    def _leave(self, request: Request) -> None:
        """For good."""
        if request.slot is None:
            self.waiting.remove(request)
        else:
            self._stop_running(request)
        self._num_pooled -= request.pooling is not None
        del self.requests[request.id]

    def _stop_running(self, request: Request) -> None:
        assert request.slot is not None
        self.running.remove(request)
        self.pool.release(request.id)
        self._free_slots.append(request.slot)
        self._released.add(request.slot)
        request.slot = None
        for key in request.keys[request.num_named :]:
            if self._computing.get(key) is request:
                del self._computing[key]

    def _chunk(self, request: Request, count: int) -> Chunk:
        """The next `count` tokens of a running request, which count as computed from now on."""
        assert request.slot is not None
        start, end = request.computed, request.computed + count
        known = len(request.tokens)
        tokens = request.tokens[start:end] if start < known else []
        last = end == request.length + len(request.draft)
        wanted = num_draws = 1 + len(request.draft) if last and not request.pooling else 0
        scored: list[int] = []
        if request.pooling:
            wanted = count if request.pooling == "mean" else int(last)
        elif self._scores(request) and request.scored < min(end, request.num_prompt - 1):
            first = max(start, request.scored)
            wanted = end - first
            scored = request.tokens[first + 1 : min(end + 1, request.num_prompt)]
            request.scored = min(end, request.num_prompt - 1)
        chunk = Chunk(
            request.id,
            request.slot,
            (*tokens, *request.draft) if last else tuple(tokens),
            start,
            self.pool.news(request.id),
            request.drawing > 0 and end > known,
            num_draws,
            wanted,
            tuple(scored),
            None if request.announced else _admission(request),
        )
        request.announced = True
        request.computed = end
        request.drawing += num_draws > 0
        return chunk

    def _finish(
        self, chunk: Chunk, request: Request, admission: int, new: Sequence[int]
    ) -> Output | None:
        """What is new of a request after its chunk, if anything is."""
        known = len(request.tokens)
        if chunk.num_draws:
            self._accept(request, chunk, new)
        if request.slot is not None and request.admitted == admission:  # not preempted since
            request.computed -= chunk.num_draws - len(new)  # of a wrong draft
            computed = min(chunk.end, request.computed)  # more if the next step runs
            self._name_blocks(request, computed)
            self.pool.trim(request.id, computed)
        if request.pooling and chunk.end == request.num_prompt:
            request.finish_reason = "stop"
        ended = request.finish_reason is not None
        output = request.output(known) if ended or len(request.tokens) > known else None
        if ended:
            self._leave(request)
        return output

    def _accept(self, request: Request, chunk: Chunk, tokens: Sequence[int]) -> None:
        """Append drawn tokens up to one that ends the request."""
        request.drawing -= 1
        drafted = chunk.num_draws - 1
        if drafted:
            self.counters.drafted += drafted
            self.counters.accepted += len(tokens) - 1
            request.draft = ()
        for token in tokens:
            request.accept(token, self.max_len)
            self.counters.generated_tokens += 1
            if request.finish_reason is not None:
                break
        if chunk.end - drafted == request.num_prompt:
            self.counters.prompt_tokens += request.num_prompt

    def _name_blocks(self, request: Request, computed: int) -> None:
        """Let others find the blocks that are full of tokens which have been computed."""
        full = min(computed, len(request.tokens)) // self.pool.block_size
        if request.num_named >= full or not self.pool.shares:
            return
        extend_keys(request.keys, request.tokens, self.pool.block_size, request.salt)
        for place in range(request.num_named, full):
            self.pool.name(request.id, place, request.keys[place])
            if self._computing.get(request.keys[place]) is request:
                del self._computing[request.keys[place]]
        request.num_named = full

    def _scores(self, request: Request) -> bool:
        return request.params.prompt_logprobs is not None

    def _rank(self, request: Request) -> tuple[int, int]:
        return (request.priority if self.by_priority else 0, request.number)


def _admission(request: Request) -> Admission:
    """The request as the worker needs it, before its first chunk is computed."""
    cached = request.tokens[: request.computed] if request.params.penalized else ()
    return Admission(
        request.params,
        request.seed & SEED_BITS,
        request.num_prompt,
        request.eos_ids,
        request.pooling,
        tuple(cached),
    )
