"""The scheduler: selects the requests of each step, and how many of their tokens it computes."""

from bisect import insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from atomc.runtime.blocks import BlockPool
from atomc.runtime.image_cache import ImageCache
from atomc.runtime.image_limits import ImageLimits
from atomc.runtime.pixel_store import PixelStore
from atomc.runtime.prefix_cache import extend_keys
from atomc.runtime.prompt_image import overlapping
from atomc.runtime.request import FinishReason, Output, Request
from atomc.runtime.request_errors import RequestErrors
from atomc.runtime.snapshots import Snapshots
from atomc.runtime.speculative import ForcedAcceptance
from atomc.runtime.state_rows import StateRows
from atomc.runtime.step import Admission, Chunk, ImageRows, ScheduledStep

# Each prompt token with log-probabilities takes a row of V fp32 logits.
MOST_SCORED_ROWS = 128
SEED_BITS = 2**64 - 1


class QueueFull(Exception):
    """The queue is full. what: of what there is too much; retry_after: seconds."""

    def __init__(self, what: str, retry_after: float) -> None:
        super().__init__(f"{what}, the queue takes no more: try again in {retry_after:.0f} s")
        self.retry_after = retry_after


@dataclass
class Counters:
    """Totals since the scheduler was created; see Stats."""

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


@dataclass
class _StepInFlight:
    """A scheduled step that is not finished.

    requests     one per chunk
    admissions   num_admissions of each request when the step was scheduled
    """

    step: ScheduledStep
    requests: list[Request]
    admissions: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.admissions = [request.num_admissions for request in self.requests]


@dataclass
class _StepBuilder:
    """A step under construction. budget: tokens that may still be added."""

    pooled: bool
    budget: int
    chunks: list[Chunk] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)

    def accepts(self, request: Request) -> bool:
        """Whether this kind of request may be in the step."""
        return (request.pooling is not None) == self.pooled


class Scheduler:
    """Continuous batching with chunked prefill; preempts the last request when blocks run out.

    Requests are ordered by arrival; with policy "priority" by priority (lowest value first), then
    by arrival. `running` requests own blocks, `waiting` ones do not; both lists are sorted. A
    preempted request waits again and recomputes the tokens that left the prefix cache.

    State per sequence cannot go back to an earlier token. A request starts from a snapshot of it,
    and after a rejected draft from the state before the draft: the accepted tokens are computed
    again, in the step of the next draft.

    Several steps may be in flight; they finish in the order in which they were scheduled. The next
    step may reuse released blocks and slots at once, because the device runs steps in order.

    Errors of a single request go to `request_errors`; the request may still be in steps until it is
    aborted.

    can_roll_back   as in Limits
    state_rows      the rows of state per sequence; None: there is none. Without snapshots of it, no
                    prefix is shared
    lookahead       blocks are reserved for this many tokens after those of a step, because a draft
                    model writes there
    forced          accepts drafts, instead of their comparison with the sampled tokens
    images          None: the model takes no images
    image_queue_bytes   limit of the pixels of all requests

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
        state_rows: StateRows | None = None,
        snapshots: Snapshots | None = None,
        lookahead: int = 0,
        forced: ForcedAcceptance | None = None,
        images: ImageLimits | None = None,
        image_queue_bytes: int = 2**62,
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
        self.can_roll_back, self.state_rows, self.snapshots = can_roll_back, state_rows, snapshots
        self.lookahead, self.forced = lookahead, forced
        # Maximum sequence length: such a request must fit if it has the whole pool.
        self.max_len = min(max_model_len, pool.longest(2 * max_num_batched_tokens))
        self.requests: dict[str, Request] = {}
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.counters = Counters()
        self.images = None if images is None else ImageCache(images)
        self.pixels = PixelStore(image_queue_bytes)
        self._in_flight: deque[_StepInFlight] = deque()
        self._free_slots = list(reversed(range(max_num_seqs)))
        # Slots released since the last step.
        self._released: set[int] = set()
        # Keys of blocks that running requests will fill, with the request. If prefixes need a
        # snapshot: only of the blocks after which one will be taken.
        self._blocks_in_progress: dict[bytes, Request] = {}
        self._num_added = 0
        self._num_pooled = 0
        self._pooled_last = False

    @property
    def num_steps_in_flight(self) -> int:
        """Number of scheduled steps that are not finished."""
        return len(self._in_flight)

    @property
    def first_requests(self) -> Sequence[Request]:
        """The requests of the next step to finish, one per chunk."""
        return self._in_flight[0].requests

    def forget_counts(self) -> None:
        """Reset the counters and the prefix cache. There must be no requests."""
        assert not self.requests and self.pool.reset_prefix_cache(), "requests are running"
        if self.images is not None:
            self.images.clear()
        if self.snapshots is not None:
            self.snapshots.clear()
        self.counters = Counters()

    def evict(self, request_id: str) -> None:
        """Remove what the request computed from the prefix cache, and what it shares. The
        embeddings of its images are not used again.
        """
        self.pool.evict(request_id)
        request = self.requests.get(request_id)
        if request is None:
            return
        if self.snapshots is not None:
            for key in request.keys:
                self.snapshots.evict(key)
        if self.images is not None:
            for image in request.images:
                self.images.forget(image.digest)

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
            raise QueueFull(f"{len(self.waiting)} requests wait already", retry_after=1.0)
        if not self.pixels.has_room(request.images):
            held = f"images of {len(self.requests)} requests take {self.pixels.num_bytes} bytes"
            raise QueueFull(held, retry_after=1.0)
        request.images = self.pixels.add(request.images)
        request.number = self._num_added
        self._num_added += 1
        self._num_pooled += request.pooling is not None
        self.requests[request.id] = request
        insort(self.waiting, request, key=self._rank)

    def next_step(self) -> ScheduledStep | None:
        """Schedule running requests, then admit waiting ones while the token budget, slots and
        blocks suffice.

        None if there is nothing to schedule, or not before a step in flight has finished. Pooling
        steps alternate with generation steps.
        """
        kinds = (not self._pooled_last, self._pooled_last) if self._num_pooled else (False,)
        for pooled in kinds:
            in_flight = self._schedule(pooled)
            if in_flight is not None:
                self._pooled_last = pooled
                self._released.clear()
                self._in_flight.append(in_flight)
                return in_flight.step
        assert self._in_flight or not self.requests or self.request_errors.failed, (
            "there are requests, but none can be scheduled"
        )
        return None

    def finish_step(self, step: ScheduledStep, tokens: Sequence[Sequence[int]]) -> list[Output]:
        """Append the sampled tokens and return an Output for each request with new ones.

        tokens   for each chunk that samples: the accepted tokens of its draft and one more

        Requests that were aborted or finished while the step ran are skipped.
        """
        in_flight = self._in_flight.popleft()
        assert in_flight.step is step, "steps finish in the order in which they were scheduled"
        sampled = iter(tokens)
        outputs = []
        for chunk, request, admission in zip(
            step.chunks, in_flight.requests, in_flight.admissions, strict=True
        ):
            new = next(sampled) if chunk.num_samples else ()
            if request.finish_reason is None:
                output = self.request_errors.run(
                    request.id,
                    "appending its new tokens",
                    self._finish,
                    chunk,
                    request,
                    admission,
                    new,
                )
                outputs += [output] if output is not None else []
            if chunk.snapshot is not None and self.snapshots is not None:
                failed = request.id in self.request_errors.failed
                self.counters.snapshots += self.snapshots.finish(
                    chunk.snapshot, None if failed else request, chunk.end, admission
                )
        assert next(sampled, None) is None, (
            f"{len(tokens)} token lists, but fewer chunks that sample"
        )
        return outputs

    def undo_step(self, step: ScheduledStep) -> None:
        """Revert the last scheduled step, which failed before or while it ran."""
        in_flight = self._in_flight.pop()
        assert in_flight.step is step, "only the last step can be undone"
        self._released.update(step.released)
        if self.images is not None:
            self.images.undo(step.images, step.dropped)
        for chunk, request, admission in zip(
            step.chunks, in_flight.requests, in_flight.admissions, strict=True
        ):
            request.num_in_flight -= bool(chunk.num_samples)
            if chunk.snapshot is not None and self.snapshots is not None:
                self.snapshots.drop(chunk.snapshot)
            if request.slot is not None and request.num_admissions == admission:
                request.admission_sent = chunk.admission is None
                request.computed = chunk.start
                request.last_snapshot = min(request.last_snapshot, chunk.start)
                request.scored = min(request.scored, chunk.start)
                self.pool.resend_blocks(request.id)
                if chunk.start and not self.can_roll_back:
                    self._preempt(request)

    def abort(self, request_id: str, reason: FinishReason = "abort") -> bool:
        """Remove a request and free its blocks; False if the id is unknown (it may just have
        finished).
        """
        request = self.requests.get(request_id)
        if request is None:
            return False
        request.finish_reason = reason
        self._remove(request)
        return True

    def check(self) -> None:
        """Assert the invariants between two calls."""
        self.pool.check()
        self.pixels.check([image for request in self.requests.values() for image in request.images])
        if self.images is not None:
            self.images.check()
        if self.snapshots is not None:
            chunks = [chunk for in_flight in self._in_flight for chunk in in_flight.step.chunks]
            self.snapshots.check({x.snapshot for x in chunks if x.snapshot is not None})
        self._check_queues()
        for request in (*self.running, *self.waiting):
            self._check_request(request)
        assert {request.id for request in self._blocks_in_progress.values()} <= self.pool.owners, (
            "keys of a request that is not running"
        )
        expected = sum(
            bool(chunk.num_samples)
            for in_flight in self._in_flight
            for chunk, request in zip(in_flight.step.chunks, in_flight.requests, strict=True)
            if request.finish_reason is None
        )
        counted = sum(request.num_in_flight for request in (*self.running, *self.waiting))
        assert expected == counted, "num_in_flight is wrong"

    def _check_queues(self) -> None:
        queued = sorted(request.id for request in (*self.running, *self.waiting))
        assert sorted(self.requests) == queued, "a request is missing or queued twice"
        assert len(self.running) <= self.max_num_seqs, "more running requests than max_num_seqs"
        assert self.pool.owners == {request.id for request in self.running}, (
            "running requests and block owners differ"
        )
        slots = [request.slot for request in self.running if request.slot is not None]
        assert sorted(slots + self._free_slots) == list(range(self.max_num_seqs)), (
            "a slot is lost or has two owners"
        )
        for queue in (self.running, self.waiting):
            assert queue == sorted(queue, key=self._rank), "a queue is not sorted"

    def _check_request(self, request: Request) -> None:
        assert request.finish_reason is None, f"finished but still queued: {request}"
        pending = request.pending + (len(request.draft) if request.num_in_flight else 0)
        assert pending > 0 or (request.pooling and pending == 0), f"no pending tokens: {request}"
        assert request.length <= self.max_len, f"longer than max_len: {request}"
        assert (
            request.num_cached_blocks * self.pool.block_size <= request.computed
            or request.slot is None
        ), f"blocks cached before they were computed: {request}"
        assert request.computed == 0 or request.slot is not None, (
            f"{request.id} is waiting, but computed is {request.computed}"
        )

    def _schedule(self, pooled: bool) -> _StepInFlight | None:
        """The next generation or pooling step; None if it would be empty."""
        builder = _StepBuilder(pooled, self.max_num_batched_tokens)
        if self.by_priority:
            self._preempt_for_waiting(pooled)
        if self.images is not None:
            self.images.begin(self._images_computed_in_part())
        preempted = self.counters.preemptions
        self._schedule_running(builder)
        if preempted == self.counters.preemptions:
            self._schedule_waiting(builder)
        if not builder.chunks:
            return None
        images, dropped = self.images.end() if self.images is not None else ((), ())
        self.counters.images_encoded += len(images)
        released = tuple(sorted(self._released))
        step = ScheduledStep(tuple(builder.chunks), pooled, released, images, dropped)
        return _StepInFlight(step, builder.requests)

    def _schedule_running(self, builder: _StepBuilder) -> None:
        """Add chunks of running requests, in order."""
        for request in self.running.copy():
            if not builder.budget or request.slot is None:  # preempted, and so are all after it
                return
            count = self._num_new_tokens(request, builder.budget) if builder.accepts(request) else 0
            if count and self._reserve(request, self._ahead(request.computed + count)):
                self._add_chunk(builder, request, count)

    def _schedule_waiting(self, builder: _StepBuilder) -> None:
        """Admit waiting requests in order, up to the first one that does not fit. Those whose first
        image must wait are passed by others, but not by others with images.
        """
        image_waits = False
        for request in self.waiting.copy():
            if not builder.budget or not self._free_slots:
                return
            if (
                request.num_in_flight
                or not builder.accepts(request)
                or self._awaits_cached_blocks(request)
                or (image_waits and request.images)
            ):
                continue
            # Admitted only for a chunk: the state from which it starts is not kept for a later one.
            if self._awaits_image(request):
                image_waits = True
                continue
            if not self._admit(request, builder.budget):
                return
            self._add_chunk(builder, request, self._num_new_tokens(request, builder.budget))

    def _add_chunk(self, builder: _StepBuilder, request: Request, count: int) -> None:
        chunk = self.request_errors.run(request.id, "scheduling it", self._chunk, request, count)
        if chunk is not None:
            builder.chunks.append(chunk)
            builder.requests.append(request)
            builder.budget -= count

    def _num_new_tokens(self, request: Request, budget: int) -> int:
        """Number of tokens of the request to schedule; 0 while a draft of it is verified, and if
        the next one belongs to an image that this step cannot encode. May shorten the draft.
        """
        if request.num_in_flight and request.draft:
            return 0
        due = self.snapshots is not None and self.snapshots.due(request, request.length)
        if request.draft and due:
            request.draft = ()  # the state after it would be that of rejected tokens, too
        if request.pending + len(request.draft) == 1:
            # Decode. Nothing to compute if the token in flight is the last one.
            if request.num_in_flight and not request.room(self.max_len):
                return 0
            return self._take_images(request, 1)
        count = min(request.pending + len(request.draft), budget)
        if request.params.prompt_logprobs is not None and request.scored < request.num_prompt - 1:
            count = min(count, MOST_SCORED_ROWS)
        ahead = [at - request.computed for at in request.snapshot_points if at > request.computed]
        count = min([count, *ahead])
        count = self._take_images(request, count)
        if count < request.pending + len(request.draft):
            request.draft = request.draft[: max(count - request.pending, 0)]
        return count

    def _take_images(self, request: Request, count: int) -> int:
        """How many of the next `count` tokens can be computed: those before the first image whose
        embeddings this step cannot have. The images of the others are in the step.
        """
        if not request.images:
            return count
        start = request.computed
        for image in overlapping(request.images, start, start + count):
            assert self.images is not None
            held = image.digest in self.images.held
            if not self.images.take(image):
                return max(image.start - start, 0)
            self.counters.image_cache_hits += held and start <= image.start
        return count

    def _awaits_image(self, request: Request) -> bool:
        """Whether the first token that this waiting request would compute belongs to an image that
        the step cannot encode.
        """
        if not request.images or self.images is None:
            return False
        start = self._num_cached_blocks(request) * self.pool.block_size
        return any(
            not self.images.can_take(image)
            for image in overlapping(request.images, start, start + 1)
        )

    def _images_computed_in_part(self) -> list[bytes]:
        """Images of running requests, of whose tokens some are computed and some not."""
        return [
            image.digest
            for request in self.running
            if request.images
            for image in overlapping(request.images, request.computed, request.computed + 1)
            if image.start < request.computed
        ]

    def _admit(self, request: Request, budget: int) -> bool:
        """Give a waiting request a slot, its cached prefix, and blocks for all its tokens, even if
        they take several steps, so that prefill is not preempted. False if there are not enough
        blocks.
        """
        found = self._num_cached_blocks(request)
        computed = found * self.pool.block_size
        now = computed + min(len(request.tokens) - computed, budget)
        ahead = self._ahead(len(request.tokens))
        if not self.pool.admit(request.id, request.keys[:found], self._ahead(now), ahead):
            return False
        if not request.num_admissions:
            request.num_cached = computed
            self.counters.prefix_queries += len(request.tokens) if self.pool.shares else 0
            self.counters.prefix_hits += computed
        self.waiting.remove(request)
        insort(self.running, request, key=self._rank)
        request.slot = self._free_slots.pop()
        request.num_admissions += 1
        request.admission_sent = False
        request.computed = computed
        request.num_cached_blocks = found
        if self.snapshots is not None:
            self.snapshots.start(request, found)
            self.counters.snapshot_hits += found > 0
            for point in request.snapshot_points:
                key = request.keys[point // self.pool.block_size - 1]
                self._blocks_in_progress.setdefault(key, request)
        else:
            for key in request.keys[found:]:
                self._blocks_in_progress.setdefault(key, request)
        return True

    def _num_cached_blocks(self, request: Request) -> int:
        """Number of leading blocks in the prefix cache. At least one token is left to compute; 0 if
        every row is needed (mean pooling, prompt_logprobs).
        """
        if not self.pool.shares or request.pooling == "mean" or self._scores(request):
            return 0
        return (
            self.request_errors.run(
                request.id, "looking up its prefix in the cache", self._match, request
            )
            or 0
        )

    def _match(self, request: Request) -> int:
        self._extend_keys(request)
        keys = request.keys[: (len(request.tokens) - 1) // self.pool.block_size]
        if self.snapshots is not None:
            return self.snapshots.match(keys, self.pool.match)
        return self.pool.match(keys)

    def _awaits_cached_blocks(self, request: Request) -> bool:
        """Whether a running request will compute the next block that this one needs, or take a
        snapshot from which this one could start.
        """
        if not self._blocks_in_progress:
            return False
        found = self._num_cached_blocks(request)
        missing = request.keys[found : (len(request.tokens) - 1) // self.pool.block_size]
        if self.snapshots is None:
            missing = missing[:1]  # blocks are filled in order
        return any(key in self._blocks_in_progress for key in missing)

    def _preempt_for_waiting(self, pooled: bool) -> None:
        """Preempt running requests for waiting ones of higher priority."""
        for request in self.waiting.copy():
            if (
                request.num_in_flight
                or (request.pooling is not None) != pooled
                or self._awaits_cached_blocks(request)
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
        found = self._num_cached_blocks(request)
        now = min(found * self.pool.block_size + self.max_num_batched_tokens, len(request.tokens))
        ahead = self._ahead(len(request.tokens))
        return self.pool.has_room(request.keys[:found], self._ahead(now), ahead)

    def _ahead(self, num_tokens: int) -> int:
        """Number of tokens for which to reserve blocks, to compute the first num_tokens."""
        return min(num_tokens + self.lookahead, self.max_len)

    def _reserve(self, request: Request, num_tokens: int) -> bool:
        """Reserve blocks for num_tokens, preempting from the end of `running`. False if the request
        itself was preempted.
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

    def _remove(self, request: Request) -> None:
        """Remove a finished or aborted request."""
        if request.slot is None:
            self.waiting.remove(request)
        else:
            self._stop_running(request)
        self._num_pooled -= request.pooling is not None
        self.pixels.remove(request.images)
        request.images = ()
        del self.requests[request.id]

    def _stop_running(self, request: Request) -> None:
        assert request.slot is not None
        self.running.remove(request)
        self.pool.release(request.id)
        self._free_slots.append(request.slot)
        self._released.add(request.slot)
        request.slot = request.state_from = None
        for key in request.keys[request.num_cached_blocks :]:
            if self._blocks_in_progress.get(key) is request:
                del self._blocks_in_progress[key]

    def _chunk(self, request: Request, count: int) -> Chunk:
        """The chunk of the next `count` tokens; marks them as computed."""
        assert request.slot is not None
        start, end = request.computed, request.computed + count
        known = len(request.tokens)
        tokens = request.tokens[start:end] if start < known else []
        last = end == request.length + len(request.draft)
        num_output_rows = num_samples = (
            1 + len(request.draft) if last and not request.pooling else 0
        )
        scored: list[int] = []
        if request.pooling:
            num_output_rows = count if request.pooling == "mean" else int(last)
        elif self._scores(request) and request.scored < min(end, request.num_prompt - 1):
            first = max(start, request.scored)
            num_output_rows = end - first
            scored = request.tokens[first + 1 : min(end + 1, request.num_prompt)]
            request.scored = min(end, request.num_prompt - 1)
        chunk = Chunk(
            request.id,
            request.slot,
            (*tokens, *request.draft) if last else tuple(tokens),
            start,
            self.pool.take_new_blocks(request.id),
            request.num_in_flight > 0 and end > known,
            num_samples,
            num_output_rows,
            tuple(scored),
            None if request.admission_sent else _admission(request),
            request.tokens[end] if end < known else 0,
            self._forced(request) if num_samples > 1 else None,
            _image_rows(request, start, end),
            request.state_from,
            self._row_before_draft(request) if num_samples > 1 else None,
            self.snapshots.take(request, end) if self.snapshots and num_samples <= 1 else None,
        )
        request.state_from = None
        request.admission_sent = True
        request.computed = end
        request.num_in_flight += num_samples > 0
        return chunk

    def _row_before_draft(self, request: Request) -> int | None:
        """The row that is to keep the state before a draft; None if it is there, or can be rolled
        back.
        """
        assert request.slot is not None
        if self.can_roll_back or self.state_rows is None:
            return None
        row = self.state_rows.before_draft(request.slot)
        return None if row == request.state_from else row

    def _forced(self, request: Request) -> int | None:
        """How many tokens of its draft to accept; None: those that are equal."""
        if self.forced is None or request.params.structured is not None:
            return None
        return min(self.forced.count(request.seed, request.num_drafts), len(request.draft))

    def _finish(
        self, chunk: Chunk, request: Request, admission: int, new: Sequence[int]
    ) -> Output | None:
        """The Output of a request after its chunk; None without new tokens."""
        known = len(request.tokens)
        if chunk.num_samples:
            self._accept(request, chunk, new)
        if request.slot is not None and request.num_admissions == admission:  # not preempted since
            self._reject(request, chunk, chunk.num_samples - len(new))
            computed = min(chunk.end, request.computed)  # larger if another step is in flight
            self._cache_full_blocks(request, computed)
            self.pool.trim(request.id, computed)
        if request.pooling and chunk.end == request.num_prompt:
            request.finish_reason = "stop"
        ended = request.finish_reason is not None
        output = request.output(known) if ended or len(request.tokens) > known else None
        if ended:
            self._remove(request)
        return output

    def _reject(self, request: Request, chunk: Chunk, count: int) -> None:
        """Go back to the state before the last `count` tokens of the chunk, which were rejected."""
        if count and self.state_rows is not None and not self.can_roll_back:
            assert request.slot is not None
            request.computed = chunk.start
            request.state_from = self.state_rows.before_draft(request.slot)
        else:
            request.computed -= count

    def _accept(self, request: Request, chunk: Chunk, tokens: Sequence[int]) -> None:
        """Append sampled tokens up to one that finishes the request."""
        request.num_in_flight -= 1
        drafted = chunk.num_samples - 1
        if drafted:
            self.counters.drafts += 1
            self.counters.drafted += drafted
            self.counters.accepted += len(tokens) - 1
            request.draft = ()
            request.num_drafts += 1
        for token in tokens:
            request.accept(token, self.max_len)
            self.counters.generated_tokens += 1
            if request.finish_reason is not None:
                break
        if chunk.end - drafted == request.num_prompt:
            self.counters.prompt_tokens += request.num_prompt

    def _cache_full_blocks(self, request: Request, computed: int) -> None:
        """Add full blocks of computed tokens to the prefix cache."""
        full = min(computed, len(request.tokens)) // self.pool.block_size
        if request.num_cached_blocks >= full or not self.pool.shares:
            return
        self._extend_keys(request)
        for place in range(request.num_cached_blocks, full):
            self.pool.cache(request.id, place, request.keys[place])
            if self._blocks_in_progress.get(request.keys[place]) is request:
                del self._blocks_in_progress[request.keys[place]]
        request.num_cached_blocks = full

    def _extend_keys(self, request: Request) -> None:
        extend_keys(
            request.keys, request.tokens, self.pool.block_size, request.salt, request.images
        )

    def _scores(self, request: Request) -> bool:
        return request.params.prompt_logprobs is not None

    def _rank(self, request: Request) -> tuple[int, int]:
        return (request.priority if self.by_priority else 0, request.number)


def _image_rows(request: Request, start: int, end: int) -> tuple[ImageRows, ...]:
    """The images with tokens in a chunk of the tokens start to end - 1."""
    found = []
    for image in overlapping(request.images, start, end) if request.images else ():
        first = max(start, image.start)
        count = min(end, image.end) - first
        found.append(ImageRows(image.digest, first - start, first - image.start, count))
    return tuple(found)


def _admission(request: Request) -> Admission:
    """What the worker needs to know of the request, sent with its first chunk."""
    cached = request.tokens[: request.computed] if request.params.penalized else ()
    return Admission(
        request.params,
        request.seed & SEED_BITS,
        request.num_prompt,
        request.eos_ids,
        request.pooling,
        tuple(cached),
        tuple([(image.start, image.grid) for image in request.images]),
    )
